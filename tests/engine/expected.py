"""Tiny checkpoints by name, and what the contracts say of a prompt on them: the reference, its chain, and how far off.

What is compared with comes from ``tests.reference``, which shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.runner import Runner
from hypic.types import Policy
from tests.checkpoints import exact_oracle_logits, minimax, qwen
from tests.engine.prompts import POLICY, Pieces, flat
from tests.reference import Live, Reference, Result, SegmentLink

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}

MAKERS: dict[str, Callable[[Path], Path]] = {
    "qwen": qwen,
    "qwen-wrapper": lambda f: qwen(f, wrapper=True),
    "qwen-tied": lambda f: qwen(f, tie_word_embeddings=True),
    "qwen-wide": lambda f: qwen(f, hidden_size=64, head_dim=16, linear_num_value_heads=6, linear_value_head_dim=20),
    "qwen-conv-2": lambda f: qwen(f, linear_conv_kernel_dim=2),
    "qwen-linear": lambda f: qwen(f, single="linear_attention"),
    "qwen-attention": lambda f: qwen(f, single="full_attention"),
    "minimax": minimax,
    "minimax-partial": lambda f: minimax(f, rotary_dim=8),
    "minimax-linear": lambda f: minimax(f, single="linear_attention"),
    "minimax-attention": lambda f: minimax(f, single="full_attention"),
}
FAMILIES = ["qwen", "qwen-wrapper", "minimax", "minimax-partial"]


class Checkpoints:
    """Folders by name, made when they are first asked for; their engines' models and references are kept as well."""

    def __init__(self, make_folder: Callable[[str], Path], device: str = "cpu") -> None:
        self._make_folder, self.device = make_folder, device
        self._folders: dict[str, Path] = {}
        self.reference = cache(lambda name: Reference(self.folder(name)))
        self.runner = cache(self._runner)
        self._expected = cache(self._evaluate)
        self._full = cache(self._evaluate_full)

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            self._folders[name] = MAKERS[name](self._make_folder(name))
        return self._folders[name]

    def _runner(self, name: str, dtype: str) -> Runner:
        config = EngineConfig(
            device=self.device, graphs=False, dtype=dtype, memory="64MiB", max_context=4096, max_running=4
        )
        return Runner.load(self.folder(name), config)

    def expected(self, name: str, pieces: Pieces, policy: Policy = POLICY, generated: Sequence[int] = ()) -> Result:
        """What sections 3 and 4 of the contract give for a prompt and its answer."""
        chain = tuple((type(link), tuple(link.ids)) for link in links(pieces, policy))
        return self._expected(name, chain, policy.seam, policy.compose, policy.rotate, tuple(generated))

    def full(self, name: str, pieces: Pieces) -> Tensor:
        """Full recompute by transformers; with partial rotation it is no oracle, and the reference's one row is."""
        return self._full(name, tuple(flat(pieces)))

    def _evaluate_full(self, name: str, ids: tuple[int, ...]) -> Tensor:
        if name == "minimax-partial":
            return self.reference(name).full(ids).logits
        return exact_oracle_logits(self.folder(name), ids)

    def _evaluate(self, name: str, chain: Any, seam: int, compose: Any, rotate: bool, generated: Any) -> Result:
        parts = [Live(ids) if kind is Live else SegmentLink(ids, seam) for kind, ids in chain]
        parts += [Live(generated)] if generated else []
        return self.reference(name).evaluate(parts, compose=compose, rotate=rotate)


def links(pieces: Pieces, policy: Policy = POLICY) -> list[Live | SegmentLink]:
    """The chain of a prompt, from the contract: which segments are cached depends on prompt and policy alone."""
    pieces = [piece for piece in pieces if piece.ids]
    chain: list[Live | SegmentLink] = []
    for number, piece in enumerate(pieces):
        is_cached = piece.segment is not None and policy.reuse == "segments" and number < len(pieces) - 1
        is_cached = is_cached and len(piece.ids) > policy.seam and len(piece.ids) >= policy.shortest
        chain.append(SegmentLink(piece.ids, policy.seam) if is_cached else Live(piece.ids))
    return chain


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude of ``expected``; nothing to compare is no agreement."""
    assert found.shape == expected.shape and expected.numel(), f"{found.shape} against {expected.shape}"
    found, expected = found.double().cpu(), expected.double().cpu()
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")
