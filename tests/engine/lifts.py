"""Families of linear attention as the folder lists them, drawn inputs, and a lift as the map that it is."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hypic.engine import linear

F64 = torch.float64
HEADS, K, V = 3, 8, 5


def families() -> dict[str, tuple[Any, type]]:
    """Every family of the package, by its module: an instance, and the class of its inputs."""
    found: dict[str, tuple[Any, type]] = {}
    for info in pkgutil.iter_modules(linear.__path__):
        module = importlib.import_module(f"{linear.__name__}.{info.name}")
        own = [item for item in vars(module).values() if getattr(item, "__module__", "") == module.__name__]
        kinds = [item for item in own if isinstance(item, type) and hasattr(item, "lift") and hasattr(item, "step")]
        inputs = [item for item in own if is_dataclass(item) and item.__name__.endswith("Inputs")]
        assert len(kinds) == len(inputs) == 1, f"{info.name} is no family of the form that is expected here"
        found[info.name] = kinds[0](), inputs[0]
    return found


FAMILIES = families()
GATED = [name for name, (_, inputs) in FAMILIES.items() if "g" in {field.name for field in fields(inputs)}]


def draw(name: str, num_chunks: int, num_tokens: int, seed: int = 0, dtype: torch.dtype = F64) -> Any:
    """Inputs ``[M, H, C, ...]`` of a family, decaying slowly."""
    family, kind = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    shape = (num_chunks, HEADS, num_tokens)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*shape, *dims, generator=generator, dtype=F64)

    gate_dims = (K,) if family.has_channel_gate else ()
    drawn = {
        "q": normal(K),
        "k": torch.nn.functional.normalize(normal(K), dim=-1),
        "v": normal(V),
        "g": -0.1 * torch.rand(*shape, *gate_dims, generator=generator, dtype=F64),
        "beta": torch.rand(*shape, generator=generator, dtype=F64),
    }
    return kind(**{field.name: drawn[field.name].to(dtype) for field in fields(kind)})


def mapped(x: Any, change: Any) -> Any:
    return type(x)(**{field.name: change(getattr(x, field.name)) for field in fields(x)})


def joined(x: Any, y: Any) -> Any:
    return type(x)(**{f.name: torch.cat([getattr(x, f.name), getattr(y, f.name)], dim=2) for f in fields(x)})


def stepped(family: Any, x: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: outputs ``[M, H, C, V]`` and the state after."""
    outputs = []
    for t in range(x.k.shape[2]):
        out, state = family.step(mapped(x, lambda tensor, t=t: tensor[:, :, t]), state)
        outputs.append(out)
    return torch.stack(outputs, dim=2), state


def probed(family: Any, x: Any) -> tuple[Tensor, Tensor]:
    """``(T [M, H, K, K], B [M, H, K, V])``: the recurrence on the state ``[0 | I]`` with values ``[v | 0]``."""
    num = len(x.k)
    state = torch.cat([x.v.new_zeros(num, HEADS, K, V), torch.eye(K, dtype=x.v.dtype).expand(num, HEADS, K, K)], dim=-1)
    wide = replace(x, v=torch.nn.functional.pad(x.v, (0, K)))
    _, end = stepped(family, wide, state)
    return end[..., V:], end[..., :V]


def as_matrix(transition: Tensor) -> Tensor:
    eye = torch.eye(K, dtype=transition.dtype)
    missing = 4 - transition.ndim
    return transition if missing == 0 else transition[(...,) + (None,) * missing] * eye
