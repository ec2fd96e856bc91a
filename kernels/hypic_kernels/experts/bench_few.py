"""Times of experts of few tokens, for ``bench.py --only few``: both launches in several sizes, and the whole layer.

As the other cases, with a shared expert behind a gate and a residual, one of each for every set of inputs. ``in`` and
``back`` are single launches, ``layer`` is both, experts chosen on the way; ``present`` is the way of more tokens, from
the same logits. All are compared with the reference on what is timed, and not timed if wrong.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels import experts
from hypic_kernels.experts import few, pairs, reference
from hypic_kernels.experts.layout import Few, Shared, choose_few
from hypic_kernels.matvec.layout import NORMED, choose_normed, widest
from hypic_kernels.matvec.triton import normed_product
from hypic_kernels.pointwise import add_rms_norm, silu_mul
from hypic_kernels.timing import replayed_s
from hypic_kernels.trust import relative_error

LIMIT = 2.0**-7
NUM_SETS = 8
SIZED = (1, 4)
"""Numbers of tokens for which sizes are compared."""
INTO = (
    *(Few(4, 1024, 1, 4), Few(8, 512, 1, 4), Few(2, 2048, 1, 4), Few(4, 512, 3, 4), Few(2, 1024, 1, 2)),
    *(Few(4, 2048, 1, 8), Few(4, 1024, 1, 4, 1, True)),
)
BACK = (
    *(Few(4, 512, 1, 4, 1), Few(2, 512, 1, 2, 1), Few(4, 512, 1, 4, 4), Few(2, 512, 1, 4, 8), Few(1, 512, 1, 2, 8)),
    *(Few(8, 512, 1, 8, 1), Few(4, 512, 1, 4, 1, True)),
)


@dataclass(frozen=True)
class Matrices:
    """``into [E, 2 I, D]``, ``back [E, D, I]``, and a shared expert for every set."""

    into: Tensor
    back: Tensor
    shared: Sequence[Shared]
    top_k: int

    @classmethod
    def beside(cls, into: Tensor, back: Tensor, top_k: int) -> Matrices:
        width, inner = back.shape[1:]

        def draw(*shape: int) -> Tensor:
            return torch.empty(shape, device=into.device, dtype=into.dtype).normal_(std=0.03)

        shapes = ((inner, width), (inner, width), (width, inner), (width,))
        return cls(into, back, [Shared(*(draw(*shape) for shape in shapes)) for _ in range(NUM_SETS)], top_k)


@dataclass(frozen=True)
class Set:
    of: Matrices
    shared: Shared
    x: Tensor
    logits: Tensor
    joined: Tensor
    """The shared expert's first matrices as one, for the present way."""

    @classmethod
    def draw(cls, of: Matrices, num_tokens: int, number: int) -> Set:
        device, dtype = of.into.device, of.into.dtype
        generator = torch.Generator(device).manual_seed(number)
        x, logits = (
            torch.randn(num_tokens, size, generator=generator, device=device).to(dtype)
            for size in (of.into.shape[2], len(of.into))
        )
        shared = of.shared[number]
        return cls(of, shared, x, logits, torch.cat([shared.first, shared.up]))

    @property
    def scores(self) -> few.Scores:
        return few.Scores(self.logits, self.of.top_k, True)

    def launches(self, into: Few, back: Few) -> tuple[Callable[[], None], Callable[[], None], Tensor]:
        """Both, and what the second fills."""
        out = torch.full_like(self.x, torch.nan)
        made = few.made_for(self.x, self.of.into, self.scores, self.shared, True)
        first = pairs.into(self.x, self.logits, *made[:2], self.of.into, self.shared, "silu", *made[2:], into)
        summed = (made.hidden, *made[:2], self.of.back, self.shared, made.factors, True, self.x, out)
        return first.run, pairs.back(*summed, back).run, out

    def present(self) -> Tensor:
        weights, chosen = experts.route(self.logits, self.of.top_k)
        tokens, places, ends = experts.order(chosen, len(self.of.into))
        rows = experts.down(experts.gate_up(self.x, self.of.into, ends, tokens=tokens), self.of.back, ends)
        gate, up = F.linear(self.x, self.joined).chunk(2, dim=-1)
        shared = F.linear(silu_mul(gate, up), self.shared.down)
        return experts.combine(rows, places, weights, shared=shared, x=self.x, gate=self.shared.gate, residual=self.x)

    def exact(self) -> Tensor:
        weights, chosen = reference.route(self.logits, self.of.top_k, True)
        x = self.x.float()
        return reference.answer(x, self.of.into, self.of.back, weights, chosen, self.shared, x, True)

    def num_bytes(self, part: str) -> int:
        """Of matrices of experts that are hit, read once, shared ones too."""
        weight = self.of.into if part == "in" else self.of.back
        _, chosen = reference.route(self.logits, self.of.top_k, True)
        return (len(set(chosen.flatten().tolist())) + 1) * weight[0].nbytes


def rows(of: Matrices, repeats: int) -> Iterator[dict[str, Any]]:
    for num_tokens in (1, 2, 4, 8, 16):
        sets = [Set.draw(of, num_tokens, number) for number in range(NUM_SETS)]
        exact, chosen = sets[0].exact(), choose_few(num_tokens, of.into.dtype)
        if num_tokens in SIZED:
            for part, sizes in (("in", INTO), ("back", BACK)):
                for each in dict.fromkeys([chosen[part == "back"], *sizes]):
                    pair = (each, chosen[1]) if part == "in" else (chosen[0], each)
                    about = {"tokens": num_tokens, "name": part, "sizes": each._asdict(), "chosen": each in chosen}
                    yield {**about, **_timed(sets, exact, part, pair, repeats)}
        early = (chosen[0]._replace(early=True), chosen[1]._replace(early=True))
        for name, pair in (("layer", chosen), ("layer, early", early)):
            yield {"tokens": num_tokens, "name": name, **_timed(sets, exact, "layer", pair, repeats)}
        error, time_s = relative_error(sets[0].present(), exact), replayed_s([each.present for each in sets], repeats)
        yield {"tokens": num_tokens, "name": "present", "relative_error": error, "us": round(1e6 * time_s, 2)}
        yield from _behind_norm(sets, chosen, early, repeats)


def _behind_norm(
    sets: Sequence[Set], chosen: tuple[Few, Few], early: tuple[Few, Few], repeats: int
) -> Iterator[dict[str, Any]]:
    """Times of all that follows a mixer: residual, norm, router's product, experts; its parts are checked elsewhere."""
    router, scale = sets[0].of.into.new_empty(sets[0].logits.shape[1], sets[0].x.shape[1]).normal_(), sets[0].x[0]
    sizes = choose_normed(len(sets[0].x), router.shape, router.dtype) or widest(NORMED, router.dtype)
    for name, pair in (("behind norm", chosen), ("behind norm, early", early)):
        runs: list[Callable[[], object]] = []
        for each in sets:
            normed, total = torch.empty_like(each.x), torch.empty_like(each.x)
            given = (each.x, each.x, scale, router, 1e-6, True, each.logits, normed, total)
            runs += [normed_product(*given, sizes._replace(early=pair[0].early)).run, *each.launches(*pair)[:2]]
        time_s = replayed_s(runs, repeats) * 3
        yield {"tokens": len(sets[0].x), "name": name, "us": round(1e6 * time_s, 2)}

    def present(each: Set) -> Callable[[], object]:
        def run() -> Tensor:
            normed, _ = add_rms_norm(each.x, each.x, scale, eps=1e-6, is_zero_centred=True)
            each.logits.copy_(F.linear(normed, router))
            return each.present()

        return run

    time_s = replayed_s([present(each) for each in sets], repeats)
    yield {"tokens": len(sets[0].x), "name": "present behind norm, with a copy", "us": round(1e6 * time_s, 2)}


def _timed(sets: Sequence[Set], exact: Tensor, part: str, pair: tuple[Few, Few], repeats: int) -> dict[str, Any]:
    from triton.errors import TritonError

    made = [each.launches(*pair) for each in sets]
    try:
        for into, back, _ in made:
            into()
            back()
        error = relative_error(made[0][2], exact)
        if not error <= LIMIT:
            return {"relative_error": error, "fault": "wrong; not timed"}
        parts = {"in": slice(0, 1), "back": slice(1, 2), "layer": slice(0, 2)}[part]
        launches: list[Callable[[], object]] = [launch for each in made for launch in [each[0], each[1]][parts]]
        time_s = replayed_s(launches, repeats) * len(launches) / len(sets)
    except (TritonError, RuntimeError, subprocess.CalledProcessError) as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"}
    names = ("in", "back") if part == "layer" else (part,)
    moved = sum(each.num_bytes(name) for each in sets for name in names) / len(sets)
    return {"relative_error": error, "us": round(1e6 * time_s, 2), "gb_per_s": round(moved / time_s / 1e9)}
