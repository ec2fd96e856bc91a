"""Markers that keep text opaque to a chat template, and the way back from what it rendered.

Pure text: no tokens, and no template is run here; ``tokenizer`` does both.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from hypic.engine.messages import Turn
from hypic.errors import PromptError


class Rendering:
    """One use of the template: markers for what must stay opaque to it, and the way back from them.

    A marker is a random word that no caller can guess, so none can be forged. Besides the contents,
    control tokens spelled in other fields (tool descriptions, arguments, names) get a marker too.
    ``spellings`` matches every control token.
    """

    def __init__(self, spellings: re.Pattern[str] | None) -> None:
        self._spellings = spellings
        self._nonce = secrets.token_hex(12)
        self._spelled: list[str] = []

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        return [
            {**self.inert(turn.fields), "content": self._marker("c", n) if turn.parts else ""}
            for n, turn in enumerate(turns)
        ]

    def inert(self, value: Any) -> Any:
        """A copy in which every spelled control token is replaced by a marker."""
        if isinstance(value, str):
            return self._spellings.sub(self._hide, value) if self._spellings else value
        if isinstance(value, Mapping):
            return {self.inert(key): self.inert(item) for key, item in value.items()}
        return [self.inert(item) for item in value] if isinstance(value, (list, tuple)) else value

    def split(self, rendered: str, has_content: Sequence[bool]) -> list[int | tuple[str, bool]]:
        """What was rendered, in order: a message's number for its content, else text and whether it is data.

        Raises:
            PromptError: a content stands in it twice, not at all or out of order.
        """
        shown: list[int | tuple[str, bool]] = []
        for n, text in enumerate(re.split(f"{self._nonce}([cd][0-9]+)z", rendered)):
            if n % 2 == 0:
                shown += [(text, False)] if text else []
            else:
                number = int(text[1:])
                shown.append(number if text[0] == "c" else (self._spelled[number], True))
        found = [item for item in shown if isinstance(item, int)]
        for n in (n for n, some in enumerate(has_content) if some and found.count(n) != 1):
            raise PromptError(f"the chat template shows message {n} {found.count(n)} times, not once; leave it out.")
        if found != sorted(found):
            raise PromptError(f"the chat template shows the messages in the order {found}; give them in that order.")
        return shown

    def _marker(self, kind: str, number: int) -> str:
        return f"{self._nonce}{kind}{number}z"

    def _hide(self, match: re.Match[str]) -> str:
        self._spelled.append(match[0])
        return self._marker("d", len(self._spelled) - 1)
