"""How far composed states and hidden states are from full recompute's, layer by layer, head by head.

In the first mixing layer nothing but the composition differs, so there the error of the transition is rounding. Above
it, a cached interior was computed without the text before it; what that costs is what the other layers show. Errors
are relative: the norm of the difference over that of full recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypic.engine.plan import Interior
from hypic.engine.work import Work
from hypic.types import Policy, Prompt
from hypic_apps.eval.arms import ARMS, FULL
from hypic_apps.eval.driver import Subject
from hypic_apps.eval.items import Item

ARM_NAMES = ("transition", "unprimed", "addition", "last", "seam-0", "seam-4", "seam-16", "seam-32", "no-rotation")
DISTANCES = (0, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Layer:
    """One layer's errors, averaged over prompts: of the state behind the prompt (linear layers), of the hidden states
    of the question's tokens behind the layer, and of the state's heads one by one."""

    layer: int
    kind: str
    state: float | None
    hidden: float
    heads: tuple[float, ...] = ()


@dataclass(frozen=True)
class Drift:
    """An arm's layers from the first to the last, and the error of cached tokens' hidden states by their distance
    from the segment's start, at every layer: ``by_distance[layer]`` has one number for each bin of ``DISTANCES``."""

    arm: str
    num_prompts: int
    layers: tuple[Layer, ...]
    by_distance: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True)
class Seen:
    """What one prompt left: states by linear layer, outputs of every block, the steps' work."""

    states: Sequence[Tensor]
    outputs: Sequence[Tensor]
    work: Work


def measure(
    subject: Subject, items: Sequence[Item], arms: Sequence[str] = ARM_NAMES, system: str = "",
    progress: Callable[[], None] = lambda: None,
) -> list[Drift]:  # fmt: skip
    """Every arm's drift over the items' prompts; each prompt has to fit one step of the engine."""
    errors: dict[str, list[list[tuple[Tensor | None, float]]]] = {arm: [] for arm in arms}
    near: dict[str, list[Sequence[Sequence[Tensor]]]] = {arm: [] for arm in arms}
    for item in items:
        full = _look(subject, item, FULL, system)
        for arm in arms:
            found = _look(subject, item, arm, system)
            errors[arm].append(_errors(subject, found, full))
            near[arm].append(_by_distance(found, full))
        progress()
    kinds = [_kind(layer) for layer in _layers(subject)]
    return [Drift(arm, len(items), _mean(errors[arm], kinds), _binned(near[arm])) for arm in arms]


def _layers(subject: Subject) -> list[nn.Module]:
    model: Any = subject.runner.model
    return list(model.layers)


def _kind(layer: nn.Module) -> str:
    name = type(getattr(layer, "mixer", None)).__name__
    return "full_attention" if name in ("Attention", "LatentAttention") else "linear_attention"


def _look(subject: Subject, item: Item, arm: str, system: str) -> Seen:
    prompt = ARMS[arm].build(item, system)
    assert prompt is not None, "arms of drift have a prompt for every item"
    subject.forget()
    return look(subject, prompt, ARMS[arm].policy)


def look(subject: Subject, prompt: Prompt, policy: Policy) -> Seen:
    """Answers one token and notes what the step that made it left behind."""
    works: list[tuple[Work, list[Tensor]]] = []
    engine = subject.engine

    def note(work: Work) -> None:
        if not works:
            held = work.requests[-1].request.held
            assert held is not None, "a request that runs holds a state"
            works.append((work, [layer[held.state_slot].clone() for layer in subject.runner.pool.states]))

    with _outputs(_layers(subject)) as outputs:
        engine.watch_step = note
        try:
            subject.ask([prompt], policy, 1)
        finally:
            engine.watch_step = None
    work, states = works[0]
    return Seen(states, [found[0] for found in outputs], work)


@contextmanager
def _outputs(layers: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """What every block gives on, step by step, all rows of it."""
    found: list[list[Tensor]] = [[] for _ in layers]

    def hook(number: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _given: Any, out: Tensor) -> None:
            found[number].append(out.detach().clone())

        return keep

    handles = [layer.register_forward_hook(hook(n)) for n, layer in enumerate(layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _errors(subject: Subject, found: Seen, full: Seen) -> list[tuple[Tensor | None, float]]:
    """Per layer the squared errors and norms of the state's heads, and the error of the hidden states of the rows
    behind the last segment, which both arms run."""
    states = iter(zip(found.states, full.states, strict=True))
    out: list[tuple[Tensor | None, float]] = []
    num_shared = _num_tail(found.work)
    for layer, mine, theirs in zip(_layers(subject), found.outputs, full.outputs, strict=True):
        number = min(num_shared, len(mine), len(theirs))
        hidden = relative(mine[-number:], theirs[-number:])
        if _kind(layer) == "full_attention" or not found.states:
            out.append((None, hidden))
            continue
        state, expected = next(states)
        out.append((torch.stack([_squares(state - expected), _squares(expected)]), hidden))
    return out


def _squares(state: Tensor) -> Tensor:
    return state.double().flatten(1).square().sum(1)


def _num_tail(work: Work) -> int:
    """Tokens of the last row of the request: what stands behind the last interior."""
    return len(getattr(work.requests[-1].chain.links[-1], "ids", (0,)))


def relative(found: Tensor, expected: Tensor) -> float:
    """``|found - expected| / |expected|``."""
    return float((found - expected).double().norm() / expected.double().norm())


def _mean(errors: Sequence[Sequence[tuple[Tensor | None, float]]], kinds: Sequence[str]) -> tuple[Layer, ...]:
    layers = []
    for number, kind in enumerate(kinds):
        hidden = sum(one[number][1] for one in errors) / len(errors)
        squares = [one[number][0] for one in errors]
        heads = [(s[0] / s[1].clamp_min(1e-30)).sqrt() for s in squares if s is not None]
        whole = [float((s[0].sum() / s[1].sum()).sqrt()) for s in squares if s is not None]
        state = sum(whole) / len(whole) if whole else None
        by_head = tuple(float(x) for x in torch.stack(heads).mean(0)) if heads else ()
        layers.append(Layer(number, kind, state, hidden, by_head))
    return tuple(layers)


def _by_distance(found: Seen, full: Seen) -> Sequence[Sequence[Tensor]]:
    """Per layer but the last (which gives on only the rows whose logits are wanted) and per bin of distance: the
    errors of the hidden states of tokens encoded in this step, against those at their places in full recompute."""
    rows, indices, positions = (torch.tensor(column, dtype=torch.long) for column in _encoded(found.work))
    bins = torch.bucketize(indices, torch.tensor(DISTANCES[1:]), right=True)
    out = []
    for mine, theirs in zip(found.outputs[:-1], full.outputs[:-1], strict=True):
        expected = theirs[positions]
        errors = (mine[rows] - expected).norm(dim=1) / expected.norm(dim=1)
        out.append([errors[bins == number] for number in range(len(DISTANCES))])
    return out


def _encoded(work: Work) -> tuple[list[int], list[int], list[int]]:
    """Rows of the step, tokens of the segment and positions in the prompt of the interiors encoded in this step."""
    plan = work.requests[-1].request.plan
    spans = {plan.ids_of(span): span for span in plan.spans if isinstance(span, Interior)}
    rows, indices, positions, row = list[int](), list[int](), list[int](), 0
    for run in work.encodes:
        ids = [int(i) for link in run.chain.links for i in getattr(link, "ids", ())]
        span = spans.get(tuple(ids))
        if span is not None:
            kept = range(span.seam, len(ids))
            rows += [row + n for n in kept]
            indices += kept
            positions += [span.origin + n for n in kept]
        row += len(ids)
    return rows, indices, positions


def _binned(found: Sequence[Sequence[Sequence[Tensor]]]) -> tuple[tuple[float | None, ...], ...]:
    if not found:
        return ()
    out = []
    for layer in range(len(found[0])):
        bins = [torch.cat([one[layer][n] for one in found]) for n in range(len(DISTANCES))]
        out.append(tuple(float(b.mean()) if len(b) else None for b in bins))
    return tuple(out)
