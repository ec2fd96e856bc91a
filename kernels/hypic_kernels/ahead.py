"""``python -m hypic_kernels.ahead``: compiles kernels for chips that need not be here; JSON lines to stdout.

A line per launch and compute capability: its name, the shared memory that a program takes, and whether the chip has
as much. The exit status is 1 if one does not compile or does not fit. Triton's interpreter must be off.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hypic_kernels import interpreted

OPERATIONS = ("attention", "delta", "decay", "conv", "pointwise", "experts", "matvec")


def _result(name: str, launch: Any, capability: int, room: int) -> dict[str, object]:
    from triton.errors import TritonError

    try:
        shared_bytes = int(launch.compile(capability).metadata.shared)
    except (TritonError, RuntimeError) as fault:
        return {"name": name, "capability": capability, "fits": False, "fault": f"{type(fault).__name__}: {fault}"}
    return {"name": name, "capability": capability, "fits": shared_bytes <= room, "shared_bytes": shared_bytes}


def _launches(operation: str, every: bool, capability: int, room: int) -> Iterable[tuple[str, Any]]:
    """Names and launches; attention's layouts depend on the chip, and experts' on its shared memory."""
    module = importlib.import_module(f"hypic_kernels.{operation}.ahead")
    about: dict[str, Any] = {"room": room} if operation == "experts" else {}
    if operation == "attention":
        about = {"chip": module.chip_of(capability, room)}
    found: Iterable[tuple[str, Any]] = module.launches(every=every, **about)
    return found


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic_kernels.ahead", description=__doc__)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {OPERATIONS}; all unless given")
    parser.add_argument("--capability", type=int, action="append", help="80, 90, ...; all known ones unless given")
    parser.add_argument("--every", action="store_true", help="all sizes, types and layouts, not the default ones only")
    given = parser.parse_args(words)
    if interpreted():
        print("nothing can be compiled while TRITON_INTERPRET is set", file=sys.stderr)
        return 1
    from hypic_kernels.launch import SHARED_BYTES

    has_failed = False
    for operation in given.operations or OPERATIONS:
        for capability in given.capability or SHARED_BYTES:
            for name, launch in _launches(operation, given.every, capability, SHARED_BYTES[capability]):
                result = _result(name, launch, capability, SHARED_BYTES[capability])
                has_failed |= not result["fits"]
                print(json.dumps(result), flush=True)
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
