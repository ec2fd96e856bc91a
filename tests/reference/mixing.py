"""One mixing layer along a chain: rows token by token, interiors by what was kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.algebra import Inputs, recur, rotate
from tests.reference.chain import AttentionEnd, AttentionEntry, Chain, How, Interior, LinearEnd, LinearEntry, Row
from tests.reference.mixers import Attention, Linear


def last(x: Tensor, count: int) -> Tensor:
    """The last ``count`` rows of x; all of them if it has fewer, none if ``count`` is 0."""
    return x[max(len(x) - count, 0) :]


def mix(
    mixer: Linear | Attention, x: Tensor, chain: Chain, idx: int, how: How
) -> tuple[Tensor, LinearEnd | AttentionEnd]:
    """Outputs ``[N, h]`` of the rows' normed hidden states ``[N, h]``; ``idx`` is the layer's."""
    if isinstance(mixer, Attention):
        return attention(mixer, x, chain, idx, how)
    return linear(mixer, x, chain, idx, how)


def slices(chain: Chain) -> Iterator[tuple[Row | Interior, slice]]:
    """Every link with where its tokens stand among all rows' tokens (nowhere for an interior)."""
    seen = 0
    for link in chain:
        count = len(link.ids) if isinstance(link, Row) else 0
        yield link, slice(seen, seen + count)
        seen += count


def linear(mixer: Linear, x: Tensor, chain: Chain, idx: int, how: How) -> tuple[Tensor, LinearEnd]:
    """A linear-attention layer: the state and the convolution's history go from link to link."""
    raw = mixer.raw(x)
    history = raw[:0]
    parts, outputs = [mixer.inputs(x[:0], raw[:0])], [x[:0]]
    _, state = recur(parts[0])
    for link, here in slices(chain):
        if isinstance(link, Row):
            parts.append(mixer.inputs(x[here], convolve(history, raw[here], mixer.taps())))
            o, state = recur(parts[-1], state)
            outputs.append(mixer.output(x[here], o))
            tail = raw[here]
        else:
            entry = link.entry.layers[idx]
            assert isinstance(entry, LinearEntry), "a linear layer's entry is an affine map"
            state = through(entry, state, how)
            tail = entry.conv_tail[:0] if how.faults.empty_conv_tail else entry.conv_tail
        history = last(torch.cat([history, tail]), mixer.width - 1)
    return torch.cat(outputs), LinearEnd(state, history, Inputs.cat(parts), raw)


def convolve(history: Tensor, raw: Tensor, taps: Tensor) -> Tensor:
    """Every token's weighted sum over itself and the ``W - 1`` raw inputs before it, as far as there are any."""
    sequence, width, outputs = torch.cat([history, raw]), taps.shape[1], []
    for t in range(len(history), len(sequence)):
        window = last(sequence[: t + 1], width)
        outputs.append((window * taps.T[width - len(window) :]).sum(0))
    return torch.stack(outputs)


def through(entry: LinearEntry, state: Tensor, how: How) -> Tensor:
    """The state behind an interior, from the state before it."""
    if how.compose == "last":
        return entry.end_state
    if how.compose == "addition" or how.faults.drop_transition:
        return state + entry.end_state
    return entry.transition @ state + entry.end_state


@dataclass(frozen=True)
class _Keys:
    keys: Tensor
    values: Tensor
    positions: Tensor
    angles: Tensor


def attention(mixer: Attention, x: Tensor, chain: Chain, idx: int, how: How) -> tuple[Tensor, AttentionEnd]:
    """A full-attention layer: every row token sees all keys at its own and earlier absolute positions."""
    q, k, v, gate = mixer.qkv(x)
    parts, places = [], torch.zeros(0, dtype=torch.long)
    for link, here in slices(chain):
        if isinstance(link, Row):
            parts.append(_row_keys(link, k[here], v[here]))
            places = torch.cat([places, parts[-1].positions])
        else:
            parts.append(_interior_keys(link, idx, how))
    positions, angles = torch.cat([p.positions for p in parts]), torch.cat([p.angles for p in parts])
    keys, values = torch.cat([p.keys for p in parts]), torch.cat([p.values for p in parts])
    turned, queries = rotate(keys, angles, mixer.frequencies), rotate(q, places, mixer.frequencies)
    outputs = [q[:0]]
    for query, place in zip(queries, places, strict=True):
        visible = positions <= place
        outputs.append(mixer.attend(query, turned[visible], values[visible])[None])
    return mixer.output(torch.cat(outputs), gate), AttentionEnd(keys, values, positions, k, v)


def _row_keys(row: Row, keys: Tensor, values: Tensor) -> _Keys:
    positions = row.position + torch.arange(len(row.ids))
    return _Keys(keys, values, positions, positions)


def _interior_keys(link: Interior, idx: int, how: How) -> _Keys:
    entry = link.entry.layers[idx]
    assert isinstance(entry, AttentionEntry), "an attention layer's entry holds keys and values"
    local = link.entry.start + torch.arange(link.entry.num_tokens)
    angles = local + (link.position + how.faults.shift_position_by if how.rotate else 0)
    if how.faults.skip_rotation:
        angles = torch.zeros_like(local)
    return _Keys(entry.keys, entry.values, link.position + local, angles)
