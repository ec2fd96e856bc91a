"""What an idle combiner takes back of the work that it gave to a slower peer: pure, in seconds.

A plan goes by costs that may be wrong. When a worker has nothing left to encode and a peer has segments of the same
requests that it cannot have begun (those behind its present step), some of them change hands, as in work stealing
(Blumofe and Leiserson 1999), but asked of the peer by a message that may come too late: then a segment is encoded twice
and the second answer is dropped. The other way, segments that wait here while a peer is idle are simply planned again.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypic.engine.parallel.assign import Member, alike
from hypic.engine.parallel.cost import EncodeCost
from hypic.engine.parallel.view import View
from hypic.engine.parallel.wants import Pending

# Nothing changes hands for less than this share of the time that it would take as it is.
WORTH_SHARE = 0.1


def num_begun(num_tokens: Sequence[int], batch_tokens: int) -> int:
    """How many of the segments that are awaited, in the order in which they were asked, a step may hold already."""
    begun, total = 0, 0
    while begun < len(num_tokens) and total < batch_tokens:
        total += num_tokens[begun]
        begun += 1
    return begun


def num_to_take(num_tokens: Sequence[int], peer: EncodeCost, own: EncodeCost, elapsed_s: float) -> int:
    """How many of the last of these segments are better encoded here.

    ``num_tokens`` are those of the segments that are awaited of a peer, in the order in which they were asked; the
    peer's present step began ``elapsed_s`` ago.
    """
    begun = num_begun(num_tokens, peer.batch_tokens)
    left_s = max(0.0, peer.together_s(num_tokens[:begun]) - elapsed_s)
    rest = num_tokens[begun:]
    as_it_is_s = left_s + peer.together_s(rest)

    def ends_s(taken: int) -> float:
        return max(own.together_s(rest[len(rest) - taken :]), left_s + peer.together_s(rest[: len(rest) - taken]))

    best = min(range(len(rest) + 1), key=lambda taken: (ends_s(taken), taken))
    return best if ends_s(best) < (1 - WORTH_SHARE) * as_it_is_s else 0


def to_take_back(waiting: Sequence[Pending], own: Member, view: View, now: float) -> list[Pending]:
    """What ``own``, which is idle, takes back of what is awaited: of one peer, the first from which it is worth it."""
    by_peer: dict[tuple[int, int], list[Pending]] = {}
    for pending in waiting:
        if not pending.is_fetch:
            by_peer.setdefault(pending.peer, []).append(pending)
    for id, asked in by_peer.items():
        peer = view.get(*id)
        if peer is None:
            continue
        mine, theirs = (member.encode for member in alike([own, peer.member(now)]))
        num_tokens = [len(pending.entry.ids) for pending in asked]
        count = num_to_take(num_tokens, theirs, mine, now - max(peer.came_s, asked[0].asked_s))
        if count:
            view.promises(id[0], theirs.together_s(num_tokens[:-count]), now)
            return asked[-count:]
    return []
