"""``compose``: the state before every element of ragged chains of affine maps ``S -> T S + B``, and the states after.

An element is the map of a chunk of tokens or of a cached interior (HYPIC, arXiv 2607.01299); maps stay where they are
and are named by index, so nothing is gathered first. ``fold`` gives the product of each chain instead. The definition
is ``reference.py``, the fast twin ``triton.py``, the derivation README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.compose import reference
from hypic_kernels.compose.chains import IDENTITY, NOT_WANTED, STILL, ZERO, Chains, ChainsError, Turns
from hypic_kernels.compose.check import Variant, WriteVariant, is_trusted
from hypic_kernels.compose.layout import Config, LayoutError, Precision, kind_of, pitch_of
from hypic_kernels.trust import is_trusted as is_right

__all__ = [
    "IDENTITY",
    "NOT_WANTED",
    "STILL",
    "ZERO",
    "Backend",
    "Chains",
    "ChainsError",
    "Config",
    "LayoutError",
    "Precision",
    "Turns",
    "compose",
    "fold",
    "write_rows",
]

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)


def compose(
    chains: Chains,
    transitions: Sequence[Tensor],
    end_states: Sequence[Tensor],
    initial: Tensor,
    *,
    before: Tensor | None = None,
    final: Tensor | None = None,
    precision: Precision = "ieee",
    backend: Backend = "auto",
    config: Config | None = None,
    turns: Turns | None = None,
) -> tuple[Tensor, Tensor]:
    """Walk every chain from its initial state; see ``Chains`` for what indexes what.

    ``transitions`` and ``end_states`` are one or two sources each: ``T [M, H]``, ``[M, H, K]`` or ``[M, H, K, K]``, all
    of one kind, and ``B [M, H, K, V]``. ``initial [slots, H, K, V]``. Any of float32, bfloat16 and float16, rows evenly
    spaced. Returns ``before [num_outputs, H, K, V]``, rows written as ``out_index`` says and no others, and
    ``final [num_chains, H, K, V]``, in float32 (float64 if ``initial`` is). Tensors given for these are written and
    returned; they must be contiguous and must not overlap an input.

    ``turns`` says which elements' end states are rotated along ``K`` as they are read (a segment that is moved, where
    keys are rotary); transitions must then be ``[M, H]``, which rotations leave as they are.

    ``precision`` of dense products: ``"ieee"`` float32, or ``"tf32x3"``, three TF32 products that carry about as many
    digits on matrix units. ``backend="auto"`` takes the kernel for CUDA tensors where it runs and its self-check
    passes, the reference otherwise and wherever a gradient or float64 is asked for; the interpreter runs only for
    ``"triton"``.

    Raises:
        ChainsError: shapes differ, or an index of ``chains`` points outside a tensor.
        LayoutError: an input's rows are not evenly spaced.
    """
    before, final = _outputs(chains, initial, before, final)
    _check(chains, transitions, end_states, initial, before, final)
    if turns is not None:
        _check_turns(turns, chains, transitions, initial)
    _run(chains, transitions, end_states, initial, before, final, precision, backend, config, turns)
    return before, final


def fold(
    chains: Chains,
    transitions: Sequence[Tensor],
    end_states: Sequence[Tensor],
    *,
    precision: Precision = "ieee",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The product of each chain's maps: ``(T [num_chains, H, ...], B [num_chains, H, K, V])``, float32 or float64.

    The same walk on the state ``[0 | I]``, adding ``[B | 0]``: the first columns end as ``B``, the others as ``T``. An
    empty chain gives the identity. Chains must want no state before any element; their initial states are not used.

    Raises:
        ChainsError: as ``compose``, or a state before an element is wanted.
    """
    if chains.num_outputs:
        raise ChainsError(f"fold writes no states before elements, {chains.num_outputs} are wanted; use NOT_WANTED.")
    shape, dtype = transitions[0].shape[1:], _state_dtype(transitions[0])
    state, device = (1, *end_states[0].shape[1:]), transitions[0].device
    about = state, dtype, device, torch.is_inference_mode_enabled()  # what is made there no gradient goes through
    nothing = chains.once(("nothing", *about), lambda: torch.zeros(state, dtype=dtype, device=device))
    _, end_state = compose(
        chains.starting_at(ZERO), transitions, end_states, nothing, precision=precision, backend=backend
    )
    unit = chains.once(("unit", shape, *about), lambda: _unit(transitions[0].ndim, shape, nothing))
    before, final = _outputs(chains, unit, None, None)
    _run(chains.starting_at(0), transitions, None, unit, before, final, precision, backend, None)
    return final.reshape(chains.num_chains, *shape), end_state


def write_rows(source: Tensor, places: Tensor, target: Tensor, slots: Tensor, *, backend: Backend = "auto") -> None:
    """``target[slots[p]] = source[places[p]]``, nothing where the slot is negative.

    ``source [R, ...]`` and ``target [slots, ...]`` contiguous, rows of one shape; ``places, slots [P]`` of one type,
    int32 or int64. Rows that go to one slot leave one of them there, whichever.

    Raises:
        ChainsError: shapes or types do not fit.
    """
    shapes = f"source {list(source.shape)}, target {list(target.shape)}"
    if source.shape[1:] != target.shape[1:] or not (source.is_contiguous() and target.is_contiguous()):
        raise ChainsError(f"{shapes} must hold rows of one shape, and be contiguous.")
    if places.shape != slots.shape or places.dtype != slots.dtype or slots.dtype not in (torch.int32, torch.int64):
        raise ChainsError(f"places {list(places.shape)} and slots {list(slots.shape)} must be whole numbers, as many.")
    is_known = source.is_cuda and available() and not interpreted() and {source.dtype, target.dtype} <= set(STORAGE)
    variant = WriteVariant(source.device, source.dtype, target.dtype, slots.dtype, source[:1].numel())
    if backend == "reference" or (backend == "auto" and not (is_known and is_right(variant))):
        reference.write_rows(source, places, target, slots)
        return
    from hypic_kernels.compose import writing

    writing.write_rows(source, places, target, slots).run()


def _unit(ndim: int, shape: torch.Size, like: Tensor) -> Tensor:
    """A state ``[1, H, K, W]`` that any transition turns into itself: the identity, or a column of ones."""
    if ndim == 4:
        return torch.eye(shape[-1], dtype=like.dtype, device=like.device).repeat(1, shape[0], 1, 1)
    return like.new_ones((1, shape[0], shape[1] if ndim == 3 else 1, 1))


def _state_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _outputs(chains: Chains, initial: Tensor, before: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype, shape = _state_dtype(initial), initial.shape[1:]
    if before is None:
        before = torch.empty((chains.num_outputs, *shape), dtype=dtype, device=initial.device)
    if final is None:
        final = torch.empty((chains.num_chains, *shape), dtype=dtype, device=initial.device)
    return before, final


def _check(
    chains: Chains,
    transitions: Sequence[Tensor],
    end_states: Sequence[Tensor],
    initial: Tensor,
    before: Tensor,
    final: Tensor,
) -> None:
    heads, key_dim, value_dim = initial.shape[1:]
    kinds = {2: (heads,), 3: (heads, key_dim), 4: (heads, key_dim, key_dim)}
    state = (heads, key_dim, value_dim)
    if not 1 <= len(transitions) == len(end_states) <= 2:
        raise ChainsError(
            f"{len(transitions)} and {len(end_states)} sources of T and B given; give one or two of both."
        )
    for number, tensor in enumerate(transitions):
        _fits(f"transitions[{number}]", tensor, kinds.get(transitions[0].ndim, ()), chains.num_transitions[number])
    for number, tensor in enumerate(end_states):
        _fits(f"end_states[{number}]", tensor, state, chains.num_states[number])
    if len(transitions) == 1 and chains.num_states[1]:
        raise ChainsError("chains name source 1, but one source is given; give two.")
    for name, tensor in (("before", before), ("final", final)):
        if tensor.dtype != _state_dtype(initial) or not tensor.is_contiguous():
            raise ChainsError(f"{name} must be contiguous {_state_dtype(initial)}; it is {tensor.dtype}.")
    _fits("initial", initial, state, chains.num_initial)
    _fits("before", before, state, chains.num_outputs)
    _fits("final", final, state, chains.num_chains)


def _check_turns(turns: Turns, chains: Chains, transitions: Sequence[Tensor], initial: Tensor) -> None:
    rows, cos, sin = turns
    if transitions[0].ndim != 2:
        raise ChainsError("only transitions of one number a head stay as they are when end states are rotated.")
    if rows.dtype != torch.int32 or tuple(rows.shape) != (chains.num_elements,) or not rows.is_contiguous():
        raise ChainsError(f"turns.rows is {rows.dtype} {list(rows.shape)}; give an int32 for each element.")
    if cos.shape != sin.shape or cos.ndim != 2 or not 0 < 2 * cos.shape[1] <= initial.shape[2]:
        raise ChainsError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [P, R], 2 R of {initial.shape[2]}.")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ChainsError("cos and sin must be contiguous.")


def _fits(name: str, tensor: Tensor, shape: tuple[int, ...], rows: int) -> None:
    if tensor.shape[1:] != shape or tensor.shape[0] < rows:
        wanted = ", ".join(map(str, shape))
        raise ChainsError(f"{name} has shape {list(tensor.shape)}; it must be [at least {rows}, {wanted}].")
    pitch_of(tensor)


def _run(
    chains: Chains,
    transitions: Sequence[Tensor],
    end_states: Sequence[Tensor] | None,
    initial: Tensor,
    before: Tensor,
    final: Tensor,
    precision: Precision,
    backend: Backend,
    config: Config | None,
    turns: Turns | None = None,
) -> None:
    num_turned = 0 if turns is None else turns.cos.shape[1]
    serves = backend == "triton" or _kernel_serves(
        transitions, end_states or (), initial, final, precision, config, num_turned
    )
    if backend == "reference" or not serves:
        reference.compose(chains, transitions, end_states, initial, before, final, turns)
        return
    from hypic_kernels.compose import triton as kernel

    kernel.compose(chains, transitions, end_states, initial, before, final, precision, config, turns)


def _kernel_serves(
    transitions: Sequence[Tensor],
    end_states: Sequence[Tensor],
    initial: Tensor,
    final: Tensor,
    precision: Precision,
    config: Config | None,
    num_turned: int,
) -> bool:
    """Whether ``auto`` means the kernel: CUDA, storage types that it reads, no gradient, and a passed self-check."""
    if not final.is_cuda or final.dtype != torch.float32 or not available() or interpreted():
        return False
    tensors = (*transitions, *end_states, initial)
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if wants_gradient or any(tensor.dtype not in STORAGE for tensor in tensors):
        return False
    key_dim, value_dim = final.shape[2:]
    dtypes, state_dtypes = (tuple(tensor.dtype for tensor in group) for group in (transitions, end_states))
    kind = kind_of(transitions[0])
    return is_trusted(
        Variant(final.device, kind, key_dim, value_dim, dtypes, state_dtypes, precision, config, num_turned)
    )
