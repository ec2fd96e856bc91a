"""Workers as Ray's actors: the same worker code, two of them on one host."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hypic.engine.sizing import Need
from hypic.engine.starting import setup_of
from hypic.errors import ConfigError
from tests.checkpoints import qwen
from tests.engine.parallel.running import cold_prompt, config, running, until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@needs_ray
@pytest.mark.timeout(600)
def test_two_actors_encode_for_this_process_and_one_is_killed(tmp_path: Path) -> None:
    import ray

    folder = qwen(tmp_path / "model")
    prompts = [cold_prompt(seed, count=9) for seed in (1, 2)]
    with running(folder, 1) as alone:
        expected = [alone.ask(prompt)[0] for prompt in prompts]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        settings = config(3, launcher="ray")
        setup = replace(setup_of(settings), speaks=False, routes=False, planner="round-robin")
        with running(folder, 3, setup, launcher="ray") as engine:
            assert engine.ask(prompts[0])[0] == expected[0]
            assert engine.workers.peers.counts.came == 6
            victim = engine.workers.supervisor.hellos[0]
            place: Any = engine.workers.supervisor._places[victim.rank]
            place.process.kill()
            assert engine.ask(prompts[1])[0] == expected[1]
            until(lambda: any(h.rank == victim.rank and h.generation > victim.generation
                              for h in engine.workers.supervisor.hellos), 200)  # fmt: skip
            assert engine.leaked() == Need()
    finally:
        ray.shutdown()


def test_ray_that_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"hypic\[ray\]"):
        setup_of(config(2, launcher="ray"))
    with pytest.raises(ConfigError, match="launcher"):
        config(2, launcher="slurm")
