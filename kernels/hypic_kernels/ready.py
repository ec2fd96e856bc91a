"""Compiled kernels found again without asking Triton, whose own way to one costs the host more than the launch itself.

Triton finds a kernel by what its arguments are: the type of a tensor and whether its memory begins at a multiple of 16
bytes, whether a whole number is 1 or a multiple of 16 and in how many bits it fits, and by constants and options. All
of that is looked at here too, for every argument and every time, and never less finely than Triton does
(``tests/kernels/test_ready.py``; over whole steps ``tests/engine/test_kept_launches.py``), so that two launches which
are taken for the same have the same machine code. The first of them goes through Triton, which compiles, and what it
gives back is kept; the next are handed to that kernel's launcher. Whatever is not as it was in the releases of Triton
that were read, as hooks, or debugging, goes Triton's way.

Pointers are handed over as numbers, so that the driver is not asked about each; hence every tensor must be on the
device of the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime import driver

KNOWN_RELEASES = ("3.6.", "3.7.")
_LEAST, _MOST, _UNSIGNED = -(1 << 31), (1 << 31) - 1, 1 << 63
# How a whole number is told from others.
_ANY, _ONE, _ALIGNED, _WIDE, _WIDE_ALIGNED = range(5)


class Ready(NamedTuple):
    """A compiled kernel; ``constants`` as they stand behind the arguments. ``kernel`` is what it was compiled from."""

    kernel: Any
    launcher: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Given(NamedTuple):
    """Arguments: what a kernel is found by, and what it is handed."""

    kinds: tuple[Hashable, ...]
    values: Sequence[Any]


def run(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    device: int,
) -> None:
    """``kernel[grid](*arguments, **constants, **options)`` on the current stream of ``device``, which is current."""
    given = given_of(arguments, device) if is_usual(kernel) else None
    if given is None:
        kernel[grid](*arguments, **constants, **options)
        return
    # Triton's functions hash their sources; ``found.kernel`` keeps this one alive, so that no other gets its number.
    key = id(kernel), device, given.kinds, *constants, *constants.values(), *options.items()
    found = _kept().get(key)
    if found is None:
        made = kernel[grid](*arguments, **constants, **options)
        ready = ready_of(kernel, made, len(arguments), constants)
        if ready is not None:
            _kept()[key] = ready
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    found.launcher(x, y, z, stream, found.function, found.metadata, None, None, None, *given.values, *found.constants)


def given_of(arguments: tuple[Any, ...], device: int) -> Given | None:
    """``None`` where an argument is of a kind that is not known here, or a tensor lies elsewhere.

    One plain loop, which is what costs a launch most: it was measured faster than passes over all at once.
    """
    kinds: list[Any] = []
    values, note = list(arguments), kinds.append
    for place, value in enumerate(arguments):
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.get_device() != device:
                return None
            values[place] = pointer = value.data_ptr()
            note((value.dtype,) if pointer & 15 else value.dtype)
        elif kind is int:
            if not _LEAST <= value <= _MOST:
                if value >= _UNSIGNED:
                    return None
                note(_WIDE_ALIGNED if value & 15 == 0 else _WIDE)
            else:
                note(_ONE if value == 1 else _ANY if value & 15 else _ALIGNED)
        elif kind is float or value is None:
            note(kind)
        else:
            return None
    return Given(tuple(kinds), values)


def is_usual(kernel: Any) -> bool:
    """Whether Triton would do nothing besides finding the kernel and launching it, but for one thing that is left out:
    to see that no module's constant which the kernel was compiled with has been given another value."""
    if not _is_known():
        return False
    runtime = knobs.runtime
    before, behind = runtime.launch_enter_hook, runtime.launch_exit_hook
    return not (
        getattr(kernel, "pre_run_hooks", True)  # which a function of the interpreter has not
        or runtime.debug
        or getattr(before, "calls", before)  # Triton's own chain; None and a function may stand in its place
        or getattr(behind, "calls", behind)
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )


def ready_of(kernel: Any, made: Any, num_arguments: int, constants: Mapping[str, Any]) -> Ready | None:
    """What Triton gave back for a launch, if its parameters are the arguments and then the constants; an argument that
    is a constant to the compiler is not looked at by its value here."""
    names = kernel.arg_names[num_arguments:]
    is_known = set(names) == set(constants) and not any(one.is_constexpr for one in kernel.params[:num_arguments])
    if not is_known or getattr(made, "function", None) is None:
        return None
    return Ready(kernel, made.run, made.function, made.packed_metadata, tuple(constants[name] for name in names))


@functools.cache
def _is_known() -> bool:
    """Whether this Triton launches as the releases that were read."""
    return bool(triton.__version__.startswith(KNOWN_RELEASES))


@functools.cache
def _kept() -> dict[Hashable, Ready]:
    """By process, as Triton keeps what it has compiled; whoever finds nothing there asks Triton."""
    return {}
