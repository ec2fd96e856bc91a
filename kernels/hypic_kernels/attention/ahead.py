"""``python -m hypic_kernels.attention.ahead``: the kernel compiled for chips that are not here; lines of JSON.

Triton compiles for a named chip without a GPU. What comes out says whether a layout is possible there: shared memory
against the chip's limit, registers and what spilled. Every layout that may be chosen there is built, for tiles of 1 to
64 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hypic_kernels import interpreted
from hypic_kernels.attention.layout import SHARED_BYTES, Config, HeadDims, default_config, most_rows

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
TILES = (1, 4, 16, 64)
TABLES = ("slots", "key_positions", "starts", "lengths", "token_positions", "tile_chain", "tile_first", "tile_count")
HEADS = {
    "64": HeadDims(4, 64, 64, 64),
    "96": HeadDims(4, 96, 96, 96),
    "128": HeadDims(4, 128, 128, 128),
    "192": HeadDims(4, 192, 192, 64),
    "192-128": HeadDims(1, 192, 128, 64),
    "256": HeadDims(8, 256, 256, 64),
    "256-none": HeadDims(8, 256, 256, 0),
    "latent": HeadDims(32, 64, 512, 64, is_latent=True),
}


class Built(NamedTuple):
    """What machine code takes: bytes of shared memory a program, registers and spilled bytes a thread."""

    shared_bytes: int
    num_registers: int
    spilled_bytes: int


def build(
    dims: HeadDims, dtype: torch.dtype, tile: int, config: Config, capability: int, *, is_split: bool = True
) -> Built:
    """Compiles one variant for compute capability ``capability`` (90 is 9.0).

    Raises:
        RuntimeError: the kernel was loaded for Triton's interpreter.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build_source

    from hypic_kernels.attention import triton as kernel

    if interpreted():
        raise RuntimeError("kernels are loaded for Triton's interpreter; unset TRITON_INTERPRET to compile them.")
    constants = kernel.constants(dims, 2, tile, config)
    constants |= {"IS_SPLIT": is_split, "TURNS": dims.rotary_dim > 0, "HAS_KEY_POSITIONS": False}
    function: Any = kernel._attend
    signature = {name: _type_of(name, dtype, is_split, constants) for name in function.arg_names}
    numbers = [n for n, name in enumerate(function.arg_names) if signature[name] != "constexpr"]
    # Pointers and strides are multiples of 16, as they are for every model; the number of splits may be anything.
    loose = {"num_splits", "scale"}
    aligned = [n for n in numbers if function.arg_names[n] not in loose]
    source = ASTSource(
        function,
        signature,
        {(function.arg_names.index(name),): value for name, value in constants.items()},
        {(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    built = build_source(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": config.num_warps})
    return _read(built.asm["cubin"], int(built.metadata.shared))


def _type_of(name: str, dtype: torch.dtype, is_split: bool, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in TABLES:
        return "*i32"
    if name in ("cos", "sin", "logs"):
        return "*fp32"
    if name in ("q", "keys", "values", "ready", "out"):
        return "*fp32" if name == "out" and is_split else TYPES[dtype]
    return "fp32" if name == "scale" else "i32"


def _read(machine_code: bytes, shared_bytes: int) -> Built:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(machine_code)
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, f"cuobjdump says nothing of registers: {text!r}"
    return Built(shared_bytes, int(found[1]), int(found[2]))


def tiles(dims: HeadDims, dtype: torch.dtype, limit: int) -> list[int]:
    """Tokens a tile that are built: those that a chip takes which gives a program ``limit`` bytes."""
    return [tile for tile in TILES if tile <= most_rows(dims, dtype, limit)]


def rows(heads: Sequence[str], dtypes: Sequence[torch.dtype], capabilities: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row of results for each layout that ``default_config`` may choose."""
    for name, dtype, capability in itertools.product(heads, dtypes, capabilities):
        dims, limit = HEADS[name], SHARED_BYTES[capability]
        layouts = {default_config(dims, dtype, tile, limit): tile for tile in tiles(dims, dtype, limit)}
        for config, tile in layouts.items():
            built = build(dims, dtype, tile, config, capability)
            named = {"heads": name, "dtype": str(dtype).removeprefix("torch."), "capability": capability, "tile": tile}
            yield {**named, "config": config._asdict(), **built._asdict(), "fits": built.shared_bytes <= limit}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.attention.ahead", description=__doc__)
    names = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
    parser.add_argument("--heads", choices=HEADS, action="append", help="all, unless given")
    parser.add_argument("--dtype", choices=names, action="append", help="all, unless given")
    parser.add_argument("--capability", type=int, choices=SHARED_BYTES, action="append", help="all, unless given")
    given = parser.parse_args(words)
    if find_spec("triton") is None or interpreted():
        print("this needs Triton, with TRITON_INTERPRET unset", file=sys.stderr)
        return 1
    fits = True
    dtypes = [names[name] for name in given.dtype or names]
    for row in rows(given.heads or list(HEADS), dtypes, given.capability or list(SHARED_BYTES)):
        print(json.dumps(row), flush=True)
        fits = fits and row["fits"]
    return 0 if fits else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
