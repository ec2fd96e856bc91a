"""Workers as actors of Ray, over one host or several: the same worker code, started and ended by Ray.

Each actor stands in a bundle of a placement group of its own, with a GPU if the model runs on one, and Ray spreads the
bundles. The checkpoint must lie under the same path on every host, and this package must be installed there. This
process's own GPU is not Ray's to give: start Ray on this host without it (``CUDA_VISIBLE_DEVICES``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from hypic.errors import ConfigError, WorkerLost

PLACE_S = 60.0


class Launcher:
    """Starts workers as actors; ``host`` is this host's address for those on others.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, uses_gpu: bool) -> None:
        try:
            self._ray: Any = import_module("ray")
            placing: Any = import_module("ray.util.placement_group")
            strategies: Any = import_module("ray.util.scheduling_strategies")
        except ImportError as error:
            raise ConfigError("launcher is 'ray' and Ray is missing; install it: pip install 'hypic[ray]'.") from error
        self._placing, self._strategies = placing, strategies
        self._gpus = 1 if uses_gpu else 0
        if not self._ray.is_initialized():
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            self._ray.init(include_dashboard=False, log_to_driver=True, configure_logging=False)

    @property
    def host(self) -> str:
        return str(self._ray.util.get_node_ip_address())

    def __call__(self, spec: Mapping[str, Any]) -> RayProcess:
        """Start one worker.

        Raises:
            WorkerLost: the cluster has no place for it.
        """
        resources = {"CPU": 1.0, **({"GPU": 1.0} if self._gpus else {})}
        group = self._placing.placement_group([resources], strategy="SPREAD")
        if not group.wait(PLACE_S):
            self._placing.remove_placement_group(group)
            raise WorkerLost(f"Ray has no place for a worker with {resources}; lower workers= or add hosts.")
        strategy = self._strategies.PlacementGroupSchedulingStrategy(placement_group=group)
        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_restarts": 0, "scheduling_strategy": strategy}
        actor = self._ray.remote(Actor).options(**options).remote()
        return RayProcess(self._ray, actor, actor.work.remote(_told(spec)), lambda: self._free(group))

    def _free(self, group: Any) -> None:
        with suppress(Exception):  # Ray has many errors of its own for a cluster that is gone
            self._placing.remove_placement_group(group)


def _told(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What an actor is told: it sees one GPU, whichever that is, listens to other hosts, and is ended by Ray."""
    settings = dict(spec["settings"])
    settings["device"] = settings["device"].partition(":")[0]
    return {**spec, "settings": settings, "host": "0.0.0.0", "parent": 0, "path": sys.path}


class Actor:
    """The process in which Ray runs a worker."""

    def work(self, told: Mapping[str, Any]) -> None:
        """A worker's whole life."""
        sys.path.extend(path for path in told["path"] if path not in sys.path)
        module: Any = import_module(told["entry"])
        module.work(module.WorkerSpec.of(told))


class RayProcess:
    """An actor, as a supervisor sees a process."""

    def __init__(self, ray: Any, actor: Any, work: Any, free: Any) -> None:
        self._ray, self._actor, self._work, self._free = ray, actor, work, free

    @property
    def is_alive(self) -> bool:
        return not self.wait(0)

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)
        self._free()

    def wait(self, timeout_s: float) -> bool:
        done, _ = self._ray.wait([self._work], timeout=timeout_s)
        return bool(done)
