"""What holds for every test: one thread, one seed, no hub, and no GPU test without a GPU."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # after the environment: Hugging Face packages read it when they are imported

if not torch.cuda.is_available():
    # Triton reads it when it is first imported; kernels then run as Python on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)

# The same examples in every run, and no time limit on one of them: the machine may be busy.
settings.register_profile("hypic", deadline=None, derandomize=True)
settings.load_profile("hypic")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is remembered of checkpoints' files stays out of the user's cache folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whatever ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
