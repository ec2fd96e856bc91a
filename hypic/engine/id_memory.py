"""Token ids by text, packed, so that encoding a known text again costs a look-up. Knows no tokenizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from hypic.engine.token_ids import Packed, TokenIds, packed_ids

# Eight bytes an id, as keys are made of them: some 32 MiB for each memory.
REMEMBERED_IDS = 1 << 22


class IdMemory:
    """The ids of texts seen lately, packed: bounded by their number, least recently used go first. Thread-safe."""

    def __init__(self, max_ids: int = REMEMBERED_IDS) -> None:
        self._max_ids, self._num_ids = max_ids, 0
        self._packed: OrderedDict[str, Packed] = OrderedDict()
        self._lock = Lock()

    def of(self, text: str, encode: Callable[[], TokenIds]) -> TokenIds:
        found = self.get(text)
        if found is None:
            found = encode()
            self.put(text, found)
        return found

    def get(self, text: str) -> TokenIds | None:
        with self._lock:
            packed = self._packed.get(text)
            if packed is None:
                return None
            self._packed.move_to_end(text)
        return TokenIds.unpacked(packed)

    def put(self, text: str, ids: Sequence[int]) -> None:
        packed = ids.packed if isinstance(ids, TokenIds) else Packed(packed_ids(ids))
        with self._lock:
            self._take(text)
            self._packed[text] = packed
            self._num_ids += len(packed)
            while self._num_ids > self._max_ids:
                self._take(next(iter(self._packed)))

    def drop(self, is_meant: Callable[[tuple[int, ...]], bool] | None) -> None:
        with self._lock:
            known = list(self._packed.items())
            for text in [t for t, packed in known if is_meant is None or is_meant(TokenIds.unpacked(packed))]:
                self._take(text)

    def _take(self, text: str) -> None:
        self._num_ids -= len(self._packed.pop(text, ()))
