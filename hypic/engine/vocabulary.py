"""What a checkpoint's files say about tokens: which are control, which end a text, how to sample, how far seams go.

Not here: encoding a prompt, which is ``tokenizer``'s.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic.errors import CheckpointError, ConfigError
from hypic.policy import check_opening
from hypic.types import SamplingParams

if TYPE_CHECKING:
    import tokenizers

SETTINGS_FILE, OPENING = "hypic.json", "seam_opening"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def any_of(spellings: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if spellings else None


def data_tokenizer(tokenizer_json: str, control_ids: frozenset[int]) -> tokenizers.Tokenizer:
    """A copy that gives no control id, whatever the text spells, and the same ids for all else.

    Control tokens get names that no text can have, among the added tokens and in the vocabulary, where
    SentencePiece models would find them in text. They are not taken out, which would shift other ids.
    The token for unknown text keeps its name: it is the vocabulary's, not text's.
    """
    from tokenizers import Tokenizer as Backend

    parts = json.loads(tokenizer_json)
    model, nonce = parts["model"], secrets.token_hex(12)
    unknown = model.get("unk_token")
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] != unknown]
    for token in parts["added_tokens"]:
        if token["id"] in control_ids:
            token["content"] = f"{nonce}{token['id']}"
    if isinstance(model["vocab"], list):
        for i in control_ids & set(range(len(model["vocab"]))):
            model["vocab"][i][0] = f"{nonce}{i}"
        return Backend.from_str(json.dumps(parts))
    hidden = {token for token, i in model["vocab"].items() if i in control_ids} - {unknown}
    model["vocab"] = {f"{nonce}{i}" if token in hidden else token: i for token, i in model["vocab"].items()}
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if not hidden.intersection((*_pair(m), "".join(_pair(m))))]
    return Backend.from_str(json.dumps(parts))


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(found).__name__}; it must hold an object.")
    return found


def eos_ids(*sources: object) -> frozenset[int]:
    found: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id") if isinstance(source, dict) else None
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    names = _SAMPLING if generation.get("do_sample") else ("repetition_penalty",)
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("do_sample"):
        given.setdefault("temperature", 1.0)
    try:
        SamplingParams(**given)
    except ConfigError as error:
        raise CheckpointError(f"generation_config.json cannot be used: {error}") from error
    return given


def seam_opening(folder: Path) -> int:
    """How far seams follow openings with this checkpoint unless a policy says otherwise, as its ``hypic.json`` tells:
    ``{"seam_opening": 24}``; 0 without the file.

    Raises:
        CheckpointError: the file cannot be read, or says something else.
    """
    path = folder / SETTINGS_FILE
    settings = read_json(path)
    if unknown := [name for name in settings if name != OPENING]:
        raise CheckpointError(f"{str(path)!r} holds {unknown[0]!r}; the one setting that it may hold is {OPENING!r}.")
    most = settings.get(OPENING, 0)
    try:
        check_opening(most)
    except ConfigError as error:
        raise CheckpointError(f"{str(path)!r} cannot be used: {error}") from error
    return int(most)
