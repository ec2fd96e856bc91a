"""The scan over chunks and stored maps: against the loop over tokens, against dense maps, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.compose import IDENTITY, ZERO, Chains, compose
from hypic_kernels.delta import Backend, DeltaError, ScanConfig, can_scan, gated_norm, reference, scan
from hypic_kernels.delta.check import ScanVariant
from hypic_kernels.delta.layout import SCAN_CHUNK_SIZES, scan_config, scan_fits
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import ScanPrecision
from hypic_kernels.delta.walk import Walk
from hypic_kernels.trust import relative_error

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])


def by_compose(p: Problem, walk: Walk) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``before`` and finals by chain in float64, by dense maps and the other package's scan."""
    dense = p.lifted()
    elements = walk.chains.elements.clone()
    is_chunk = elements[:, 0] == 0
    elements[is_chunk, 1] = elements[is_chunk, 2]
    wanted = elements[:, 3].clone()
    elements[:, 3] = torch.arange(len(elements), dtype=torch.int32)
    chains = replace(walk.chains, elements=elements, num_outputs=len(elements))
    pools = [tensor.double() for tensor in walk.stored or (dense.transition, dense.end_state)]
    all_before, final = compose(
        chains, [dense.transition, pools[0]], [dense.end_state, pools[1]], walk.initial.double()
    )
    out = torch.full(p.v.shape, math.nan, dtype=F64)
    for place, (source, _, chunk, _) in enumerate(elements.tolist()):
        tokens = p.chunks[chunk] if source == 0 else p.chunks[0][:0]
        is_token = (tokens >= 0) & (tokens < len(p.v))
        if source == 0:
            found = dense.query[chunk] @ all_before[place] + dense.offset[chunk]
            out[tokens[is_token].long()] = found.transpose(0, 1)[is_token]
    before = all_before.new_full((walk.chains.num_outputs, *all_before.shape[1:]), math.nan)
    before[wanted[wanted >= 0].long()] = all_before[wanted >= 0]
    return out, before, final


def scanned(p: Problem, walk: Walk, backend: Backend, **others: object) -> tuple[Tensor, Tensor, Tensor]:
    out, before, final = walk.outputs(F32, F32)
    given = {"precision": "ieee", "final_slots": walk.final_slots, **others}
    scan(*p.tokens, p.chunks, walk.chains, walk.stored, walk.initial, out, rule=p.rule, before=before, final=final,
         backend=backend, **given)  # type: ignore[arg-type]  # fmt: skip
    return out, before, final


@on_both
@pytest.mark.parametrize("maps", ["float32", "bfloat16", "none"])
@pytest.mark.parametrize("size", SCAN_CHUNK_SIZES)
def test_scan_equals_dense_maps(size: int, maps: str, backend: Backend) -> None:
    p = Problem.random(Shape(24, 17, 2, 4, size, lengths=(8, 1, 2 * size + 3)))
    walk = Walk.random(p, () if maps == "none" else (getattr(torch, maps),) * 2)
    found = scanned(p, walk, backend)
    out, before, final = by_compose(p, walk)
    for name, result, exact in zip(("out", "before", "final"), found, (out, before, final[[1, 0]]), strict=True):
        assert relative_error(result, exact) < 2e-6, name
    if walk.stored is not None:
        off = by_compose(p, replace(walk, stored=(walk.stored[0].double() * 1.002, walk.stored[1])))
        assert max(map(relative_error, found[:2], off[:2])) > 2e-4


@on_both
@pytest.mark.parametrize("head_dims", [(16, 16), (5, 3), (1, 1), (40, 24)], ids=str)
def test_one_row_equals_its_tokens(head_dims: tuple[int, int], backend: Backend) -> None:
    """A chain of chunks alone is the recurrence, token after token by ``step``'s reference."""
    p = Problem.random(Shape(*head_dims, 1, 1, 16, lengths=(37,), padding=0))
    chains = Chains.of([0, 3], [ZERO] * 3, [0, 1, 2], [1], out_index=[-1] * 3)
    out = torch.full(p.v.shape, math.nan)
    _, final = scan(*p.tokens, p.chunks, chains, None, p.states, out, rule=p.rule, backend=backend, precision="ieee")
    wide, pool = p.wide(), p.states.double()
    outputs = torch.empty(p.v.shape, dtype=F64)
    for token in range(37):
        tokens = (tensor[token : token + 1] for tensor in wide.tokens)
        outputs[token], after = reference.step(*tokens, pool, torch.tensor([1], dtype=torch.int32), p.rule)
        pool[1] = after[0]
    assert relative_error(out, outputs) < 3e-6 and relative_error(final[0], pool[1]) < 3e-6
    assert relative_error(final[0], p.states[1].double()) > 1e-3


@on_both
def test_what_a_zero_transition_shuts_out_may_be_nan(backend: Backend) -> None:
    p = Problem.random(Shape(16, 16, 1, 2, 16, lengths=(5, 5), padding=0))
    stored = torch.randn(2, 2, 16, 16), torch.randn(2, 2, 16, 16)
    stored[0][1] = math.nan
    rows = [(0, 0, 0), (1, ZERO, 1), (1, IDENTITY, 0), (0, 1, 1)]
    source, transition, state = zip(*rows, strict=True)
    chains = Chains.of([0, 4], transition, state, [0], source=source, out_index=[-1] * 4)
    initial = torch.full_like(p.states, math.nan)
    out = torch.zeros(p.v.shape)
    _, final = scan(*p.tokens, p.chunks, chains, stored, initial, out, rule=p.rule, backend=backend)
    assert out[:5].isnan().all() and not out[5:].isnan().any() and not final.isnan().any()
    maps, start = p.lifted(), (stored[1][1] + stored[1][0]).double()
    assert relative_error(final[0], maps.transition[1] @ start + maps.end_state[1]) < 1e-5


@on_both
def test_neighbours_in_a_chain_of_stored_maps(backend: Backend) -> None:
    """Maps are loaded ahead: one, two and three stored ones in a row, at the start, between chunks, and at the end."""
    p = Problem.random(Shape(16, 16, 1, 1, 16, lengths=(3,) * 4, padding=0))
    stored = torch.randn(9, 1, 16, 16) / 5, torch.randn(9, 1, 16, 16)
    kinds = [1, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    counts = [0, 0]
    rows = []
    for kind in kinds:
        rows.append((kind, counts[kind], counts[kind]))
        counts[kind] += 1
    source, transition, state = zip(*rows, strict=True)
    for length in range(len(kinds) + 1):
        ends, wanted = [0, length, len(kinds)], [-1] * len(kinds)
        chains = Chains.of(ends, transition, state, [2, ZERO], source=source, out_index=wanted)
        walk = Walk(chains, stored, p.states, torch.tensor([0, 1], dtype=torch.int32), len(p.q))
        out, _, final = scanned(p, walk, backend)
        exact_out, _, exact_final = by_compose(p, walk)
        assert relative_error(out, exact_out) < 2e-6 and relative_error(final, exact_final) < 2e-6, length


@needs_interpreter
@pytest.mark.parametrize("config", [ScanConfig(16, 4), ScanConfig(64, 8)], ids=str)
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_scan_is_the_same_in_any_layout(config: ScanConfig, precision: ScanPrecision) -> None:
    for is_raw in (True, False):
        variant = ScanVariant(torch.device("cpu"), F32, F32, (F32, F32), F32, 16, 2, 24, 40, is_raw, precision, config)
        assert variant.measure() < 1e-6


def widened(handle: Any) -> Any:
    """The interpreter keeps bfloat16 numbers as 16 bits, and would multiply these."""
    if handle.data.dtype != np.uint16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return type(handle)(bits.view(np.float32), tl_float32())


def tl_float32() -> Any:
    import triton.language as tl

    return tl.float32


@needs_interpreter
@pytest.mark.parametrize("precision, most", [("bf16x6", 1e-6), ("bf16x3", 5e-5)])
def test_products_in_parts(precision: ScanPrecision, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in bfloat16 and stored maps in either type, each product of parts as on a GPU. The interpreter cuts the
    last part to bfloat16 where a GPU rounds."""
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return plain(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    for dtypes in ((F32, F32), (BF16, BF16), ()):
        variant = ScanVariant(
            torch.device("cpu"), BF16, F32, dtypes, F32, 16, 2, 24, 40, True, precision, ScanConfig(16, 4)
        )
        error = variant.measure()
        assert error < most, dtypes
        assert error > 1e-6 or precision == "bf16x6" or dtypes != (F32, F32)


@on_both
def test_states_are_written_into_the_pool(backend: Backend) -> None:
    """``initial``, ``before`` and ``final`` may be one pool."""
    p = Problem.random(Shape(8, 8, 1, 1, 16, lengths=(20,), padding=0))
    chains = Chains.of([0, 2], [ZERO] * 2, [0, 1], [1], out_index=[-1, 3])
    pool, out = p.states.clone(), torch.empty(p.v.shape)
    slots = torch.tensor([1], dtype=torch.int32)

    def run(chains: Chains, states: Tensor, **places: Tensor) -> tuple[Tensor, Tensor]:
        return scan(*p.tokens, p.chunks, chains, None, states, out, rule=p.rule, backend=backend, **places)  # type: ignore[arg-type]

    run(chains, pool, before=pool, final=pool, final_slots=slots)
    first = Chains.of([0, 1], [ZERO], [0], [1], out_index=[-1])
    _, middle = run(first, p.states)
    _, last = run(chains, p.states, before=p.states.clone())
    assert relative_error(pool[3], middle[0].double()) < 1e-6 and relative_error(pool[1], last[0].double()) < 1e-6
    assert all(torch.equal(pool[slot], p.states[slot]) for slot in (0, 2, 4))


@on_both
def test_the_norm_of_a_scan(backend: Backend) -> None:
    p = Problem.random(Shape(16, 16, 1, 2, 16, lengths=(8, 20), padding=0))
    walk, out = Walk.random(p), torch.full(p.v.shape, math.nan)
    before, final = walk.outputs(F32, F32)[1:]
    scan(*p.tokens, p.chunks, walk.chains, walk.stored, walk.initial, out, rule=p.rule, norm=p.norm, before=before,
         final=final, final_slots=walk.final_slots, backend=backend)  # fmt: skip
    exact = reference.normed(walk.exact(p)[0], p.wide().norm)
    named = ~exact.isnan()
    assert named.any() and relative_error(torch.where(named, out, 0.0), torch.where(named, exact, 0.0)) < 1e-5


@on_both
@pytest.mark.parametrize("value_dim", [1, 17, 40])
def test_the_norm(value_dim: int, backend: Backend) -> None:
    p = Problem.random(Shape(4, value_dim, 1, 3, lengths=(7,)))
    out = torch.full_like(p.v, math.nan)
    gated_norm(p.v, p.norm, out, backend=backend)
    x, z = p.v.double(), p.norm.z.double()
    scale = (x.pow(2).mean(-1, keepdim=True) + p.norm.eps).sqrt()
    assert relative_error(out, x / scale * p.norm.weight.double() * z / (1 + (-z).exp())) < 1e-6


def test_what_does_not_fit() -> None:
    p = Problem.random(Shape(4, 3, 1, 2, 16, (20,)))
    walk, out = Walk.random(p), torch.empty(p.v.shape)
    given = (*p.tokens, p.chunks, walk.chains, walk.stored, walk.initial, out)
    scan(*given, rule=p.rule)
    for place, wrong in (
        (5, p.chunks[:1]),
        (7, None),
        (7, (p.states, p.states)),
        (8, p.states[:1]),
        (9, out[:, :1]),
    ):
        changed = list(given)
        changed[place] = wrong
        with pytest.raises(DeltaError):
            scan(*changed, rule=p.rule)  # type: ignore[arg-type]
    with pytest.raises(DeltaError, match="final_slots"):
        scan(*given, rule=p.rule, final_slots=torch.zeros(2, dtype=torch.int32))


def test_what_the_kernel_has_no_room_for() -> None:
    config = scan_config(128, 128)
    assert scan_fits(16, 128, config, "bf16x3", 99 << 10) and not scan_fits(16, 128, config, "bf16x6", 99 << 10)
    assert scan_fits(16, 128, config, "bf16x6", 227 << 10) and scan_fits(16, 128, config, "tf32x3", 227 << 10)
    assert not scan_fits(64, 128, config, "bf16x3", 227 << 10) and not scan_fits(16, 129, config, "bf16x3", 227 << 10)
    p = Problem.random(Shape(4, 3, 1, 2, 16, (20,)))
    walk = Walk.random(p)
    assert can_scan(F32, 1, p.chunks, walk.stored, walk.initial, rule=p.rule)
