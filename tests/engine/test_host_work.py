"""How much of torch a layer of a cold step asks of the host, views and memory included: on a GPU a small step takes as
long as that. Bounds are what there is now, and one operator; nothing here is timed."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hypic.config import EngineConfig
from hypic.engine.layers.projections import Joined, expose_all
from hypic.engine.runner import Runner
from hypic_kernels.launch import Launch
from tests.engine.compiling import as_on_an_h200
from tests.engine.harness import Bench
from tests.engine.models.every_model import BUILDERS
from tests.engine.prompts import live, seg

# Operators and launches of our kernels, of a layer with experts.
MOST = {"GatedDeltaNet": (56, 19), "GroupedLightningAttention": (53, 16), "Attention": (61, 16)}
# The last layer has few rows left.
LAST = (33, 10)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every call of torch that reaches its dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


Counted = tuple[str, Counter[str], Counter[str]]


def counted(name: str, patch: pytest.MonkeyPatch, folder: Any) -> list[Counted]:
    """Of every layer of a step that encodes three segments beside live text: its mixer, operators, launches."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "memory": "64MiB", "max_context": 4096}
    loaded = Runner.load(BUILDERS[name](folder / name), EngineConfig(**settings, max_running=4, kernels="on"))
    bench, launches = Bench(loaded, kernels="on"), Counter[str]()
    as_on_an_h200(patch)
    patch.setattr(Launch, "run", lambda launch: launches.update([launch.kernel.fn.__name__]))
    found: list[Counted] = []
    for layer in loaded.model.layers:  # type: ignore[attr-defined]
        patch.setattr(layer, "forward", counting(layer, launches, found))
    bench.watched.is_noting = False
    bench.add([*(seg(520, 10 + n) for n in range(3)), live(70, 2)])
    bench.run()  # to no answer: nothing was computed
    return found[: len(loaded.model.layers)]  # type: ignore[attr-defined]


def counting(layer: Any, launches: Counter[str], found: list[Counted]) -> Callable[..., Any]:
    forward = layer.forward

    def run(*arguments: Any) -> Any:
        before, operators = launches.copy(), Operators()
        with operators:
            out = forward(*arguments)
        found.append((type(layer.mixer).__name__, operators.counts, launches - before))
        return out

    return run


def bound(number: int, found: list[Counted]) -> tuple[int, int]:
    return LAST if number == len(found) - 1 else MOST[found[number][0]]


@pytest.mark.parametrize("name", ["bailing_moe_linear", "qwen3_5_moe_text"])
def test_no_layer_of_a_cold_step_asks_more_of_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    found = counted(name, monkeypatch, tmp_path)
    for number, (mixer, operators, launches) in enumerate(found):
        most = bound(number, found)
        assert 0 < sum(operators.values()) <= most[0], f"layer {number}, {mixer}: {dict(operators)}"
        assert 0 < sum(launches.values()) <= most[1], f"layer {number}, {mixer}: {dict(launches)}"


def test_the_count_sees_one_view_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Parts of a product that are looked at once more pass the bound."""
    before = Joined.__call__
    monkeypatch.setattr(Joined, "__call__", lambda joined, x: [part[:] for part in before(joined, x)])
    found = counted("qwen3_5_moe_text", monkeypatch, tmp_path)
    assert all(sum(one[1].values()) > bound(number, found)[0] for number, one in enumerate(found[:-1]))


def test_parts_and_weights_are_plain_attributes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No layer of a loaded model looks into tables of ``nn.Module``; what is assigned later is found all the same."""
    config = EngineConfig(device="cpu", memory="64MiB", max_context=4096)
    model = Runner.load(BUILDERS["qwen3_5_moe_text"](tmp_path / "model"), config).model
    layer = model.layers[0]  # type: ignore[attr-defined]
    weight = layer.mixer.out_proj.weight
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__getattr__", lambda module, name: pytest.fail(f"{name} was looked for"))
        assert layer.mixer.out_proj.weight is weight and layer.mlp.experts.down_proj is not None
    other = torch.nn.Parameter(torch.zeros_like(weight))
    layer.mixer.out_proj.weight = other
    assert layer.mixer.out_proj.weight is other is dict(layer.named_parameters())["mixer.out_proj.weight"]
    expose_all(layer)
    assert layer.mixer.out_proj.weight is other


def small() -> Any:
    made = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False))
    expose_all(made)
    return made


def test_what_changes_after_exposing_is_what_its_docstring_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types, devices, copies and states that are loaded are followed; what is not, is where it is exposed again."""
    model = small().to(torch.bfloat16)
    copied = copy.deepcopy(model)
    copied.load_state_dict({name: torch.ones_like(x) for name, x in copied.state_dict().items()}, assign=True)
    for each in (model, copied):
        assert all(vars(part).get(name, x) is x for part in each for name, x in part.named_parameters())
    assert model[0].weight.dtype == torch.bfloat16 and bool((copied[0].weight == 1).all())
    assert model[0].weight is not copied[0].weight
    expose_all(copied)
    copied[0].bias = None
    copied.to_empty(device="meta")
    assert copied[0].bias is not None and not copied[1].weight.is_meta
    expose_all(copied)
    assert copied[0].bias is None and copied[1].weight.is_meta
    monkeypatch.setattr(torch.nn.Module, "__getattr__", lambda module, name: pytest.fail(f"{name} was looked for"))
    assert copied[0].bias is None is copied[1].bias
