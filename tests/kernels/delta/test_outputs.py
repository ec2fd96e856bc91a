"""How fla's kernel for outputs is found below what fla puts around it, and launched. That it gives what fla's own call
gives is a matter of the check of rows, and of ``test_run.py`` on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hypic_kernels.delta import outputs
from hypic_kernels.launch import Launch
from hypic_kernels.rows import Rows


def wrapped(names: tuple[str, ...] = outputs.ARGUMENTS + outputs.CONSTANTS, **config: Any) -> Any:
    """Rules around an autotuner around a kernel; ``config`` replaces fields of the layout that it is left."""
    layout = {"kwargs": {"BK": 64, "BV": 32}, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "pre_hook": None}
    tuner = SimpleNamespace(fn=SimpleNamespace(arg_names=list(names)), configs=[SimpleNamespace(**layout | config)])
    return SimpleNamespace(fn=tuner)


def test_the_kernel_is_found_with_its_layout() -> None:
    given = wrapped()
    assert outputs.plain_of(given) == outputs.Plain(given.fn.fn, {"BK": 64, "BV": 32}, 4, 3)


UNKNOWN: dict[str, Any] = {
    "another parameter": wrapped((*outputs.ARGUMENTS, *outputs.CONSTANTS, "NEW")),
    "another order": wrapped((*outputs.ARGUMENTS[::-1], *outputs.CONSTANTS)),
    "another block": wrapped(kwargs={"BK": 64, "BV": 32, "BW": 8}),
    "clusters": wrapped(num_ctas=2),
    "a hook": wrapped(pre_hook=print),
    "registers": wrapped(maxnreg=128),
    "no wrapper": wrapped().fn.fn,
    "several layouts": SimpleNamespace(fn=SimpleNamespace(fn=wrapped().fn.fn, configs=wrapped().fn.configs * 2)),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_built_otherwise_is_left_to_fla(what: str) -> None:
    assert outputs.plain_of(UNKNOWN[what]) is None


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter once, in its order: arguments, then constants; a program for each block, chunk and head."""
    seen: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: seen.append(launch))
    plain, rows = outputs.plain_of(wrapped()), Rows.of((70, 5))
    assert plain is not None
    q, k, v = torch.zeros(1, 75, 2, 16), torch.zeros(1, 75, 2, 16), torch.zeros(1, 75, 4, 40)
    g, states = torch.zeros(1, 75, 4), torch.zeros(1, 3, 4, 16, 40)
    out = outputs.outputs(plain, q, k, v, g, states, rows, 0.5)
    (launch,) = seen
    assert out.shape == v.shape and launch.grid == (2 * 3, 4)
    named = dict(zip(outputs.ARGUMENTS, launch.arguments, strict=True))
    tensors = {"q": q, "k": k, "v": v, "h": states, "g": g, "o": out, "cu_seqlens": rows.cu_seqlens}
    assert (
        all(named[name] is tensor for name, tensor in tensors.items()) and named["chunk_indices"] is rows.chunk_indices
    )
    assert (named["g_gamma"], named["scale"], named["T"]) == (None, 0.5, 75)
    sizes = {"H": 2, "HV": 4, "K": 16, "V": 40, "BT": 64, "BK": 64, "BV": 32}
    flags = {"USE_G": True, "USE_G_GAMMA": False, "STATE_V_FIRST": False, "IS_VARLEN": True}
    assert launch.constants == sizes | flags and set(launch.constants) == set(outputs.CONSTANTS)
    assert launch.options == {"num_warps": 4, "num_stages": 3}
    assert replace(launch, num_stages=None).options == {"num_warps": 4}
