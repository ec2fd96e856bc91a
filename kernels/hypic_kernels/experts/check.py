"""The self-checks at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hypic_kernels.experts import reference
from hypic_kernels.experts.layout import Few, Kind, Layout, Shared, choose_few
from hypic_kernels.trust import relative_error, settle

EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Variant:
    device: torch.device
    dtype: torch.dtype
    top_k: int

    @property
    def tolerance(self) -> float:
        return 1e-5 + EPSILON.get(self.dtype, 0.0)

    def measure(self) -> float:
        """The largest error of weights, of combined rows, and of experts that are not the same."""
        from hypic_kernels.experts import triton as kernel

        num, width, experts = 37, 200, max(24, self.top_k)
        generator = torch.Generator().manual_seed(1)
        draw = [torch.randn(shape, generator=generator) for shape in ((num, experts), (num, width), (num, width))]
        logits, x, shared = (tensor.to(self.device, self.dtype) for tensor in draw)
        gate = shared[0].contiguous()
        weights, chosen = reference.route(logits, self.top_k, True)
        found_weights, found = torch.empty_like(weights, dtype=torch.float32), torch.empty_like(chosen)
        kernel.route(logits, found_weights, found, True).run()
        rows, places = x.new_empty((chosen.numel(), width)), torch.empty_like(chosen)
        both = torch.zeros((2, experts), dtype=torch.int32, device=self.device)
        for launch in kernel.scatter(x, chosen, rows, places, both[0], both[1]):
            launch.run()
        out = torch.empty_like(x)
        kernel.combine(rows, places, weights, shared, x, gate, out).run()
        _, exact_places, ends = reference.scatter(x, chosen, experts)
        exact = reference.combine(x.double()[_tokens(exact_places)], exact_places, weights, shared, x, gate)
        added = torch.full_like(x, torch.nan)
        kernel.combine(rows, places, weights, shared, x, gate, added, shared).run()
        wrong = float((found != chosen).sum() + (both[1] != ends).sum() + (rows[places.long()] != x[:, None]).sum())
        errors = relative_error(out, exact), relative_error(added, shared.double() + out.double())
        return max(wrong, relative_error(found_weights, weights), *errors)


def _tokens(places: torch.Tensor) -> torch.Tensor:
    """Which token stands at each place."""
    tokens = torch.empty(places.numel(), dtype=torch.long, device=places.device)
    tokens[places.flatten().long()] = torch.arange(len(places), device=places.device).repeat_interleave(places.shape[1])
    return tokens


@dataclass(frozen=True)
class GroupsVariant:
    device: torch.device
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    num_experts: int
    top_k: int
    num_groups: int
    top_groups: int

    @staticmethod
    def of(
        logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, num_groups: int, top_groups: int
    ) -> GroupsVariant:
        bias_dtype = None if bias is None else bias.dtype
        return GroupsVariant(logits.device, logits.dtype, bias_dtype, logits.shape[1], top_k, num_groups, top_groups)

    @property
    def tolerance(self) -> float:
        return 1e-5

    def measure(self) -> float:
        """Of the scores by which experts were chosen, whichever of two equal ones it was, and of their weights."""
        from hypic_kernels.experts import routing as kernel

        generator = torch.Generator().manual_seed(4)
        logits = torch.randn(37, self.num_experts, generator=generator).to(self.device, self.dtype)
        drawn = torch.randn(self.num_experts, generator=generator) / 4
        bias = None if self.bias_dtype is None else drawn.to(self.device, self.bias_dtype)
        groups, scores = (self.num_groups, self.top_groups), logits.double().sigmoid()
        _, chosen = reference.route_groups(logits.double(), bias, self.top_k, *groups, 2.5, True)
        weights = scores.new_full(chosen.shape, torch.nan, dtype=torch.float32)
        found = torch.full_like(chosen, -1)
        kernel.route_groups(logits, bias, *groups, 2.5, True, weights, found).run()
        wrong = float((found < 0).sum() + (found.sort(dim=1).values.diff(dim=1) == 0).sum())
        biased = scores if bias is None else scores + bias.double()
        taken, exact = (biased.gather(1, each.clamp_min(0).long()).sort(dim=1).values for each in (found, chosen))
        own = scores.gather(1, found.clamp_min(0).long())
        return max(wrong, relative_error(taken, exact), relative_error(weights, 2.5 * own / own.sum(1, keepdim=True)))


@dataclass(frozen=True)
class OrderVariant:
    device: torch.device
    top_k: int

    @property
    def tolerance(self) -> float:
        return 0.0

    def measure(self) -> float:
        """How many numbers are wrong."""
        from hypic_kernels.experts import triton as kernel

        num_experts = 40 + self.top_k
        scores = torch.randn(77, num_experts, generator=torch.Generator().manual_seed(2))
        chosen = scores.argsort(dim=1)[:, : self.top_k].to(self.device, torch.int32).contiguous()
        tokens, places = (torch.full_like(chosen, -1) for _ in range(2))
        ends = torch.full((num_experts,), -1, dtype=torch.int32, device=self.device)
        for launch in kernel.order(chosen, tokens.view(-1), places, ends):
            launch.run()
        exact = reference.order(chosen, num_experts)
        found = (tokens.view(-1), places, ends)
        return float(sum(int((one != other).sum()) for one, other in zip(found, exact, strict=True)))


@dataclass(frozen=True)
class ProductVariant:
    """``rest``: what is left of the width of the sum behind whole blocks; it decides over masks and alignment."""

    device: torch.device
    dtype: torch.dtype
    kind: Kind
    is_indexed: bool
    rest: int
    layout: Layout

    @property
    def tolerance(self) -> float:
        return 1e-5 + EPSILON.get(self.dtype, 0.0)

    def measure(self) -> float:
        """Experts without rows, with one, with a block and more, all but theirs NaN."""
        from hypic_kernels.experts import products

        x, weight, ends, tokens = self._problem()
        out = x.new_full((int(ends[-1]), weight.shape[1] // (2 if self.kind == "silu" else 1)), torch.nan)
        products.multiply(x, weight, ends, tokens, self.kind, out, self.layout).run()
        if self.kind == "none":
            rows = x if tokens is None else x.index_select(0, tokens)
            exact = reference.down(rows.double(), weight.double(), ends)
        else:
            exact = reference.gate_up(x.double(), weight.double(), ends, tokens, self.kind == "silu")
        return relative_error(out, exact)

    def _problem(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        config = self.layout.config
        width, num_columns = 3 * config.block_k + self.rest, 2 * config.block_n + 6
        counts = torch.tensor([0, 1, 0, config.block_m + 3, 2, config.block_m, 0, 0, 1])
        ends = counts.cumsum(0).to(self.device, torch.int32)
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(int(ends[-1]), width, generator=generator)
        weight = torch.randn(len(counts), num_columns, width, generator=generator) / width**0.5
        weight[counts == 0] = torch.nan
        tokens = torch.randperm(len(x), generator=generator).to(self.device, torch.int32) if self.is_indexed else None
        return x.to(self.device, self.dtype), weight.to(self.device, self.dtype), ends, tokens


@dataclass(frozen=True)
class FewVariant:
    """Widths are those of a token, of an expert and of the shared one, 0 without one: kernels are compiled for them."""

    device: torch.device
    dtype: torch.dtype
    num_experts: int
    top_k: int
    widths: tuple[int, int, int]
    has_gate: bool
    is_gated: bool
    into: Few
    back: Few

    @staticmethod
    def of(
        x: torch.Tensor, into: torch.Tensor, back: torch.Tensor, top_k: int, shared: Shared | None, is_gated: bool
    ) -> FewVariant:
        widths = (*back.shape[1:], 0 if shared is None else len(shared.up))
        has_gate = shared is not None and shared.gate is not None
        sizes = choose_few(len(x), x.dtype)
        return FewVariant(x.device, x.dtype, len(into), top_k, widths, has_gate, is_gated, *sizes)

    @property
    def tolerance(self) -> float:
        return 1e-5 + 2 * EPSILON.get(self.dtype, 0.0)

    def measure(self) -> float:
        """Three tokens, experts given and chosen; matrices of experts that nobody has are NaN, and all that is written
        was NaN."""
        into, back, shared, x, logits = self._problem()
        weights, chosen = reference.route(logits, self.top_k, True)
        has_none = torch.ones(len(into), dtype=torch.bool, device=self.device)
        has_none[chosen.flatten().long()] = False
        into[has_none], back[has_none] = torch.nan, torch.nan
        exact = reference.answer(x.double(), into, back, weights.double(), chosen, shared, None, self.is_gated)
        settle(self.device)
        given = self._run(x, None, weights, chosen, into, back, shared, None)
        found_weights, found = torch.full_like(weights, torch.nan), torch.full_like(chosen, -1)
        added = self._run(x, logits, found_weights, found, into, back, shared, x)
        wrong = float((found != chosen).sum())
        return max(wrong, relative_error(given, exact), relative_error(added, exact + x.double()))

    def _run(
        self, x: torch.Tensor, logits: torch.Tensor | None, weights: torch.Tensor, chosen: torch.Tensor,
        into: torch.Tensor, back: torch.Tensor, shared: Shared | None, residual: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        from hypic_kernels.experts import pairs as kernel

        width, inner, shared_inner = self.widths
        hidden = x.new_full((len(x), self.top_k * inner + shared_inner), torch.nan)
        factors, out = weights.new_full((len(x),), torch.nan), x.new_full((len(x), width), torch.nan)
        kind: Kind = "silu" if self.is_gated else "relu2"
        kernel.into(x, logits, weights, chosen, into, shared, kind, factors, hidden, self.into).run()
        renormalise = logits is not None
        kernel.back(hidden, weights, chosen, back, shared, factors, renormalise, residual, out, self.back).run()
        return out

    def _problem(self) -> tuple[torch.Tensor, torch.Tensor, Shared | None, torch.Tensor, torch.Tensor]:
        """Only some experts have a matrix, and are chosen: of all there would be too much to hold."""
        (width, inner, shared_inner), generator = self.widths, torch.Generator(self.device).manual_seed(5)
        num_matrices = min(self.num_experts, self.top_k + 3)

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
            return drawn.div_(float(shape[-1] ** 0.5))

        into, back = draw(num_matrices, (1 + self.is_gated) * inner, width), draw(num_matrices, width, inner)
        shared = None
        if shared_inner:
            gate = draw(width) if self.has_gate else None
            shared = Shared(draw(shared_inner, width), draw(shared_inner, width), draw(width, shared_inner), gate)
        logits = draw(3, self.num_experts) * self.num_experts**0.5
        logits[:, num_matrices:] -= 20
        return into, back, shared, draw(3, width) * width**0.5, logits
