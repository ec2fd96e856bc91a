"""Faults for lack of memory, told from others by what they say and by what a device has left."""

from __future__ import annotations

import pytest
import torch

from hypic.engine.free_memory import SHORT_BYTES, free_bytes, is_out_of_memory, shortage

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
PLAIN = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
]
OPEN = [
    RuntimeError("Expected mha_graph->execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true."),
    RuntimeError("Expected mha_graph.execute(handle, variant_pack, workspace).is_good() to be true, but got false."),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
]
OTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("out of memory"),
]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the driver says is free; the last number counts."""
    numbers = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (numbers[-1], 2**40))
    return numbers


@pytest.mark.parametrize("free", [0, 2**36])
@pytest.mark.parametrize("fault", PLAIN, ids=str)
def test_what_says_so_is_believed(fault: Exception, free: int, left: list[int]) -> None:
    left.append(free)
    assert is_out_of_memory(fault, GPU) and is_out_of_memory(fault, CPU)


@pytest.mark.parametrize("fault", OPEN, ids=str)
def test_what_only_failed_is_for_lack_of_memory_where_it_is_short(fault: Exception, left: list[int]) -> None:
    left.append(SHORT_BYTES - 1)
    assert is_out_of_memory(fault, GPU) and not is_out_of_memory(fault, CPU)
    left.append(SHORT_BYTES)
    assert not is_out_of_memory(fault, GPU)


@pytest.mark.parametrize("fault", OTHER, ids=str)
def test_other_faults_are_what_they_are(fault: Exception, left: list[int]) -> None:
    assert not is_out_of_memory(fault, GPU)


def test_a_device_that_answers_nothing_any_more_is_not_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert not is_out_of_memory(OPEN[0], GPU)


def test_the_allocator_of_a_cpu_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48, dtype=torch.uint8)
    assert is_out_of_memory(caught.value, CPU)


def test_the_sentence_names_memory_and_ways_out() -> None:
    said = shortage(CPU, 3 * 2**30)
    assert "the pool holds 3,072 MiB" in said and "memory=" in said and "max_step_tokens=" in said
    assert 0 < free_bytes(CPU) < 2**50
