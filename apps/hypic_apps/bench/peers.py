"""transformers as a peer: its own prefill of given token ids, timed like ours. The only file of apps that imports it.

Not here: tokenising, which is no part of the peer's time, and decoding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# What loading or running another library's model can raise for a checkpoint or a machine it does not like.
FAILURES = (ImportError, OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)


LONGEST_REASON = 160  # what it does not know, it answers with a list of all that it does


class PeerError(Exception):
    """The peer cannot be measured; one sentence says why."""


@dataclass(frozen=True)
class FirstToken:
    """Seconds from token ids to the first new token on the host, and that token."""

    seconds: float
    token_id: int


@dataclass(frozen=True)
class Transformers:
    """A checkpoint loaded by transformers, with its default attention and its generation cache."""

    model: Any
    version: str
    device: torch.device

    @classmethod
    def load(cls, folder: str | Path, device: str, dtype: str) -> Transformers:
        """Loads the checkpoint; ``dtype`` is a torch type's name.

        Raises:
            PeerError: transformers is missing or cannot load it.
        """
        try:
            import transformers

            messages: Any = transformers.logging  # has no annotations
            messages.set_verbosity_error()
            messages.disable_progress_bar()
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        except FAILURES as error:
            raise PeerError(f"transformers cannot load this checkpoint ({_reason(error)}).") from error
        return cls(model, transformers.__version__, torch.device(device))

    @classmethod
    def made(cls, config: Mapping[str, Any], device: str, dtype: str) -> Transformers:
        """A model of a ``config.json`` with random weights, made on the device, in the library's fastest setting:
        sdpa attention, and for experts one grouped matrix product.

        Raises:
            PeerError: transformers is missing, or does not know such a model.
        """
        try:
            import transformers

            settings = {name: value for name, value in config.items() if name not in ("model_type", "dtype")}
            known: Any = transformers.AutoConfig.for_model(config["model_type"], **settings)
            options = {"experts_implementation": "grouped_mm"} if config.get("num_experts") else {}
            auto: Any = transformers.AutoModelForCausalLM
            with torch.device(device):
                model = auto.from_config(
                    known, dtype=getattr(torch, dtype), attn_implementation="sdpa", **options
                ).eval()
        except FAILURES as error:
            raise PeerError(f"transformers cannot make this model ({_reason(error)}).") from error
        return cls(model, transformers.__version__, torch.device(device))

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> FirstToken:
        """One forward over ``ids`` with an empty cache, logits of the last token only, and its likeliest successor.

        Raises:
            PeerError: the forward fails.
        """
        started = time.perf_counter()
        try:
            tokens = torch.tensor([list(ids)], device=self.device)
            logits = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits
            token_id = int(logits[0, -1].argmax())
        except FAILURES as error:
            raise PeerError(f"transformers cannot run this checkpoint ({_reason(error)}).") from error
        return FirstToken(time.perf_counter() - started, token_id)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return (
        f"{type(error).__name__}: {lines[0] if len(lines[0]) <= LONGEST_REASON else lines[0][:LONGEST_REASON] + '...'}"
    )
