"""What is compiled on an engine's thread after it is ready is told; what other threads compile is not."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hypic_kernels.compiling import Compiled
from hypic_kernels.pointwise import silu_mul

triton = pytest.importorskip("triton")


def compile_one(name: str) -> None:
    """As Triton tells it."""
    triton.knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name=name), repr=f"{name}[num_warps=4]")


def elsewhere(run: Any) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.fixture
def watched() -> Any:
    before = triton.knobs.runtime.jit_post_compile_hook
    compiled = Compiled()
    compiled.watch()
    yield compiled
    compiled.end()
    assert triton.knobs.runtime.jit_post_compile_hook == before


def test_only_its_own_thread_is_watched(watched: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        elsewhere(lambda: compile_one("other"))
        assert not watched.names and not caplog.messages
        compile_one("late")
    assert watched.names == ["late"]
    (said,) = caplog.messages
    assert "the kernel late was compiled while a request waited for it" in said


def test_two_that_watch_are_both_told_in_whatever_order_they_end() -> None:
    before, told = triton.knobs.runtime.jit_post_compile_hook, list[str]()
    triton.knobs.runtime.jit_post_compile_hook = lambda **compiled: told.append(compiled["fn"].name)
    try:
        first, second = Compiled(), Compiled()
        first.watch()
        second.watch()
        compile_one("a")
        first.end()
        compile_one("b")
        second.end()
        compile_one("c")
        assert (first.names, second.names, told) == (["a"], ["a", "b"], ["a", "b", "c"])
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def length() -> int:
    """Hooks that Triton calls one after the other, as far as ours and ``over`` say."""
    hook, num = triton.knobs.runtime.jit_post_compile_hook, 0
    while hook is not None:
        hook, num = getattr(hook, "before", None), num + 1
    return num


def over(before: Any) -> Any:
    """Somebody else's hook, which calls the one that it found."""

    def hook(**compiled: Any) -> None:
        if before is not None:
            before(**compiled)

    hook.before = before  # type: ignore[attr-defined]
    return hook


@pytest.mark.parametrize("is_covered", [False, True])
def test_those_that_come_and_go_leave_no_hook_behind(is_covered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", over(None))
    stays = Compiled()
    stays.watch()
    if is_covered:
        runtime.jit_post_compile_hook = over(runtime.jit_post_compile_hook)
    found, lengths = length(), set()
    for _ in range(100):
        one = Compiled()
        one.watch()
        one.watch()
        compile_one("a")
        assert one.names == ["a"]
        lengths.add(length())
        one.end()
        one.end()
        assert length() == found
    assert lengths == {found + is_covered} and stays.names == ["a"] * 100
    stays.end()
    assert length() == (3 if is_covered else 1)


def test_many_at_once_are_all_told_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)
    many = [Compiled() for _ in range(100)]
    for one in many:
        one.watch()
    assert length() == 1
    compile_one("a")
    assert all(one.names == ["a"] for one in many)
    for one in many[::2] + many[1::2]:
        one.end()
    assert triton.knobs.runtime.jit_post_compile_hook is None


@pytest.mark.gpu
def test_triton_tells_of_what_it_compiles(watched: Compiled) -> None:
    def multiplied(width: int) -> None:
        silu_mul(torch.ones(4, width, device="cuda"), torch.ones(4, width, device="cuda"), backend="triton")

    elsewhere(lambda: multiplied(40))
    assert not watched.names
    multiplied(9216)
    known = len(watched.names)
    assert known > 0
    multiplied(9216)
    assert len(watched.names) == known
