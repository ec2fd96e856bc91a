"""How far a segment's seam follows its opening: the short lines and sentences that it begins with.

Whether the first words of a passage are its heading, a description or already what it says shows in what follows them,
and how a passage's heading is written differs from passage to passage in one prompt. So a seam that ends within a
heading leaves the model to read what comes next as if nothing stood before the passage. A seam that ends just behind
the opening has in context where the opening ends and how what follows begins.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from hypic.policy import FARTHEST

# What ends: a line, or a sentence. White space behind a sentence belongs to what follows, but for line breaks.
END = re.compile(r"\s*\n\s*|[.!?\u061f\u0964][\"')\]\u2019\u201d\u00bb]*\s+|[\u3002\uff01\uff1f]")
# Most tokens of a line or sentence that belongs to an opening, and how many behind it are in the seam too.
SHORT, BEYOND = 16, 2
# Tokens spell fewer characters than this on average: what ends behind so many for each is not looked for.
MOST_CHARACTERS = 16


def ends_of(text: str, offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """After how many tokens a line or a sentence of a text ends that something follows, of its first ``FARTHEST``.

    ``offsets`` are where each token starts and stops in the text, as tokenizers tell them.
    """
    stops = [stop for _, stop in offsets[: FARTHEST + 1]]
    ends = (
        match.start() + len(match.group().rstrip(" ")) for match in END.finditer(text[: MOST_CHARACTERS * FARTHEST])
    )
    found = dict.fromkeys(bisect_right(stops, end) for end in ends)
    return tuple(count for count in found if 0 < count <= FARTHEST and count < len(offsets))


def width(ends: Sequence[int], most: int) -> int:
    """Tokens that a seam needs to reach beyond a text's opening, which ends with the last of its first short lines and
    sentences within ``most`` tokens; 0: it has none. ``ends`` are as ``ends_of`` gives them."""
    end = 0
    for one in ends:
        if one > most or one - end > SHORT:
            break
        end = one
    return end + BEYOND if end else 0
