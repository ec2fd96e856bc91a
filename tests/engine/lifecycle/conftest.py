"""Steps as small as a test wants them."""

from __future__ import annotations

import pytest

from hypic.engine import scheduler


@pytest.fixture(autouse=True)
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
