"""Checkpoints that the files which list all families share; a file with checkpoints of its own says so there."""

from __future__ import annotations

import pytest
import torch

from tests.engine.models.every_model import Every


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Every:
    torch.set_num_threads(1)
    return Every(lambda name: tmp_path_factory.mktemp(name))
