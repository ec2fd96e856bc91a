"""Chunks in factors and the scan over them, against the loop over tokens and against dense maps."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.compose import ZERO, Chains, compose
from hypic_kernels.delta import Backend, DeltaError, Factors, ScanConfig, factor, gated_norm, reference, scan
from hypic_kernels.delta.backend import shared_bytes
from hypic_kernels.delta.check import LiftVariant, NormVariant, ScanVariant
from hypic_kernels.delta.layout import CHUNK_SIZES, lift_candidates, scan_candidates, scan_config
from hypic_kernels.delta.problem import Problem, Shape, Walk
from hypic_kernels.delta.rule import TOLERANCE, Precision
from hypic_kernels.trust import relative_error

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])


def by_compose(p: Problem, walk: Walk, factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``before`` and finals by chain in float64, by dense maps and the other package's scan."""
    dense = reference.multiplied(Factors(*(tensor.double() for tensor in factors)))
    elements = walk.chains.elements.clone()
    is_chunk = elements[:, 0] == 0
    elements[is_chunk, 1] = elements[is_chunk, 2]
    wanted = elements[:, 3].clone()
    elements[:, 3] = torch.arange(len(elements), dtype=torch.int32)
    chains = replace(walk.chains, elements=elements, num_outputs=len(elements))
    pools = [tensor.double() for tensor in walk.maps or (p.states[:, :, :1, :1], p.states)]
    transitions = [dense.transition, pools[0] if walk.maps else dense.transition]
    all_before, final = compose(chains, transitions, [dense.end_state, pools[1]], walk.initial.double())
    out = torch.full(p.v.shape, math.nan, dtype=F64, device=p.v.device)
    for place, (source, _, chunk, _) in enumerate(elements.tolist()):
        tokens = p.chunks[chunk] if source == 0 else p.chunks[0][:0]
        is_token = (tokens >= 0) & (tokens < len(p.v))
        if source == 0:
            found = dense.query[chunk] @ all_before[place] + dense.offset[chunk]
            out[tokens[is_token].long()] = found.transpose(0, 1)[is_token]
    before = all_before.new_full((walk.chains.num_outputs, *all_before.shape[1:]), math.nan)
    before[wanted[wanted >= 0].long()] = all_before[wanted >= 0]
    return out, before, final


@on_both
@pytest.mark.parametrize("has_maps", [True, False])
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_scan_equals_dense_maps(size: int, has_maps: bool, backend: Backend) -> None:
    p = Problem.random(Shape(24, 17, 2, 4, size, lengths=(8, 1, 2 * size + 3)))
    walk = Walk.of(p, (F32, F32) if has_maps else ())
    factors = factor(*p.tokens, p.chunks, rule=p.rule, out=p.poisoned_factors(), backend=backend)
    assert max(map(relative_error, factors, p.factored())) < 1e-6
    out, before, final = walk.outputs(F32, F32)
    scan(walk.chains, factors, p.chunks, walk.maps, walk.initial, out, before=before, final=final,
         final_slots=walk.final_slots, precision="ieee", backend=backend)  # fmt: skip
    exact_out, exact_before, by_chain = by_compose(p, walk, factors)
    exact_final = by_chain[[1, 0]]
    for found, exact in ((out, exact_out), (before, exact_before), (final, exact_final)):
        assert relative_error(found, exact) < 2e-6


@on_both
@pytest.mark.parametrize("head_dims", [(16, 16), (5, 3), (1, 1), (40, 24)], ids=str)
def test_one_row_equals_its_tokens(head_dims: tuple[int, int], backend: Backend) -> None:
    """A chain of chunks alone is the recurrence, token after token by ``step``'s reference."""
    p = Problem.random(Shape(*head_dims, 1, 1, 16, lengths=(37,), padding=0))
    factors = factor(*p.tokens, p.chunks, rule=p.rule, backend=backend)
    chains = Chains.of([0, 3], [ZERO] * 3, [0, 1, 2], [1], out_index=[-1] * 3)
    out = torch.full(p.v.shape, math.nan)
    _, final = scan(chains, factors, p.chunks, None, p.states, out, backend=backend, precision="ieee")
    wide, pool = p.wide(), p.states.double()
    outputs = torch.empty(p.v.shape, dtype=F64)
    for token in range(37):
        tokens = (tensor[token : token + 1] for tensor in wide.tokens)
        slot = torch.tensor([1], dtype=torch.int32)
        outputs[token], after = reference.step(*tokens, pool, slot, p.rule)
        pool[1] = after[0]
    assert relative_error(out, outputs) < 3e-6 and relative_error(final[0], pool[1]) < 3e-6
    assert relative_error(final[0], p.states[1].double()) > 1e-3


@needs_interpreter
@pytest.mark.parametrize("config", [ScanConfig(16, 4, 1), ScanConfig(64, 8, 2)], ids=str)
def test_scan_is_the_same_in_any_layout(config: ScanConfig) -> None:
    variant = ScanVariant(torch.device("cpu"), F32, (F32, F32), F32, 16, 24, 40, "ieee", config)
    assert variant.measure() < 1e-6


@on_both
def test_states_are_written_into_the_pool(backend: Backend) -> None:
    """``initial``, ``before`` and ``final`` may be one pool."""
    p = Problem.random(Shape(8, 8, 1, 1, 16, lengths=(20,), padding=0))
    factors = factor(*p.tokens, p.chunks, rule=p.rule)
    chains = Chains.of([0, 2], [ZERO] * 2, [0, 1], [1], out_index=[-1, 3])
    pool, out = p.states.clone(), torch.empty(p.v.shape)
    slots = torch.tensor([1], dtype=torch.int32)
    scan(chains, factors, p.chunks, None, pool, out, before=pool, final=pool, final_slots=slots, backend=backend)
    alone = replace(chains, elements=chains.elements[:1], cu_elements=torch.tensor([0, 1], dtype=torch.int32))
    _, first = scan(replace(alone, num_outputs=0), factors, p.chunks, None, p.states, out)
    _, last = scan(chains, factors, p.chunks, None, p.states, out, before=p.states.clone())
    assert relative_error(pool[3], first[0].double()) < 1e-6 and relative_error(pool[1], last[0].double()) < 1e-6
    assert all(torch.equal(pool[slot], p.states[slot]) for slot in (0, 2, 4))


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
    factors, walk = factor(*p.tokens, p.chunks, rule=p.rule), Walk.of(p)
    out = torch.empty(p.v.shape)
    given = (walk.chains, factors, p.chunks, walk.maps, walk.initial, out)
    scan(*given)
    for place, wrong in (
        (1, factors._replace(left=factors.right)),
        (2, p.chunks[:1]),
        (3, None),
        (3, (p.states, p.states)),
        (4, p.states[:1]),
        (5, out[:, :1]),
    ):
        changed = list(given)
        changed[place] = wrong
        with pytest.raises(DeltaError):
            scan(*changed)  # type: ignore[arg-type]
    with pytest.raises(DeltaError, match="final_slots"):
        scan(*given, final_slots=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(DeltaError, match="bfloat16"):
        factor(*p.tokens, p.chunks, rule=p.rule, precision="bf16x3")


def test_less_room_takes_fewer_stages() -> None:
    assert scan_config(16, 128, 128, 227 << 10).num_stages == 2
    assert scan_config(16, 128, 128, 99 << 10).num_stages == 1


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "bf16x3", "bf16"])
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_every_layout_that_fits_on_a_gpu(size: int, precision: Precision) -> None:
    room = shared_bytes(torch.device("cuda", 0))
    for head_dims in ((64, 64), (96, 192), (128, 128), (24, 17)):
        for config in scan_candidates(size, *head_dims):
            for map_dtypes in ((F32, F32), (BF16, BF16), ()):
                if config.shared_bytes(size, *head_dims) > room:
                    continue
                sizes = size, *head_dims
                variant = ScanVariant(torch.device("cuda"), F32, map_dtypes, F32, *sizes, precision, config)
                assert variant.measure() < TOLERANCE[precision], variant


@pytest.mark.gpu
@pytest.mark.parametrize("size", CHUNK_SIZES)
def test_factors_and_norm_on_a_gpu(size: int) -> None:
    device = torch.device("cuda")
    for dtype, precision in ((F32, "tf32x3"), (BF16, "bf16x3")):
        for config in lift_candidates(size, 128, 128):
            variant = LiftVariant(device, dtype, size, 2, 128, 128, True, precision, config, False)  # type: ignore[arg-type]
            assert variant.measure() < TOLERANCE["tf32x3"], variant
    for out_dtype in (F32, BF16):
        norm = NormVariant(device, F32, BF16, out_dtype, 128)
        assert norm.measure() <= norm.tolerance


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_chains() -> None:
    p = Problem.random(Shape(64, 64, 2, 4, 16, (8, 8, 30)), dtype=BF16, device="cuda")
    walk = Walk.of(p)
    factors, (out, before, final) = p.poisoned_factors(), walk.outputs(F32, F32)
    slots = walk.final_slots

    def run() -> None:
        factor(*p.tokens, p.chunks, rule=p.rule, out=factors)
        scan(walk.chains, factors, p.chunks, walk.maps, walk.initial, out, before=before, final=final,
             final_slots=slots)  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    walk.chains.elements[:, 1] = walk.chains.elements[:, 1].clamp(max=0)
    walk.chains.initial_index.fill_(3)
    for tensor in (*factors, out, before, final):
        tensor.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    exact = walk.outputs(F64, F64)
    reference.scan(walk.chains, p.factored(), p.chunks, walk.maps, walk.initial, *exact, slots)
    assert max(map(relative_error, (out, before, final), exact)) < TOLERANCE["tf32x3"]
