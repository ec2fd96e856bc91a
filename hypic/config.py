"""Engine settings: one frozen object, validated when it is made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from hypic.errors import ConfigError, meant
from hypic.policy import Policy, check_flag, one_of, settle
from hypic.store_spec import TierSpec, parse_bytes, parse_store

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
KERNELS = ("auto", "on", "off")
LAUNCHERS = ("processes", "ray")
LOAD_FORMATS = ("safetensors", "dummy")
STORAGES = ("lossless", "bfloat16")
# More would end the process or the machine before anything could be said of it.
MOST_THREADS = 1024
MOST_PROCESSES = 64  # on a host, or one per core where there are more cores


@lru_cache(maxsize=64)
def _parse_ttl(ttl: float | str | None) -> Mapping[str | None, float]:
    """Seconds by namespace; under ``None`` those of all others."""
    named = [rule.strip().rpartition("=") for rule in str(ttl).split(",")] if ttl is not None else []
    times = {None if space in ("", "*") else space: _seconds(text, ttl) for space, _, text in named}
    if len(times) < len(named):
        raise ConfigError(f"ttl is {ttl!r}, which names a namespace twice; give each one time.")
    return times


def _seconds(text: str, ttl: object) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 2**53:
        raise ConfigError(f"ttl is {ttl!r}; pass seconds above 0, such as 3600 or 'alice=3600,*=86400'.")
    return value


def _memory(memory: object) -> int | float:
    """Bytes, or a share as a float; text such as ``"0.5"`` is a share, since nobody means half a byte."""
    if isinstance(memory, str) and re.fullmatch(r"\s*0?\.\d+\s*", memory):
        return _share(float(memory), memory)
    if isinstance(memory, float):
        return _share(memory, memory)
    is_fraction = isinstance(memory, str) and re.fullmatch(r"\s*\d+\.\d+\s*", memory)
    if isinstance(memory, int | str) and not isinstance(memory, bool) and not is_fraction:
        with suppress(ConfigError):
            return parse_bytes(memory)
    raise _no_memory(memory)


def _share(share: float, memory: object) -> float:
    if not 0.0 < share < 1.0:
        raise _no_memory(memory)
    return share


def _no_memory(memory: object) -> ConfigError:
    return ConfigError(
        f"memory is {memory!r}; pass bytes as a whole number, a size such as '8GiB', or a share of what is free "
        "between 0 and 1, such as 0.5."
    )


def _no_policy(policy: object) -> ConfigError:
    return ConfigError(f"policy is {policy!r}; pass hypic.Policy(...).")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    ``memory`` sizes the one pool of pages and state slots: bytes, a size such as ``"8GiB"``, or a
    share of what is free in (0, 1), such as ``0.5``; half by default. ``store`` says where cached entries are kept
    (``"device://8GiB,host://32GiB,disk:///path?size=200GiB"``, any of them): ``device`` caps what unpinned entries may
    hold of the pool (by default all that requests do not use), ``host`` and ``disk`` take what falls out of it.
    ``storage`` is the form of cached states: ``lossless``, or ``bfloat16``, half the size for a relative error of at
    most 2^-8 a number; transitions of heads whose norm is below ``drop_below`` are left out, which moves a state by at
    most that share of the one before it. ``ttl`` are the seconds after which what is cached is forgotten: a number, or
    text by namespace such as ``"alice=3600,*=86400"``, in which ``*`` is all others.
    ``max_step_tokens`` is the token budget of one step, by default 8,192, and 16,384 on a GPU of 40 GB or more, whose
    steps are otherwise bound by the host; ``page_size`` counts tokens. By ``typical_segment_tokens``, a
    typical segment's length, memory is split between pages of K/V and slots of states. ``adapter`` is a PEFT LoRA
    adapter, a folder or a repository, merged into the weights when they are loaded. ``primer`` is a text behind which
    every segment is encoded, so that its first tokens do not stand at the beginning of everything; it stands in no
    prompt and costs a request nothing. By default it is the checkpoint's own (``primer.txt``), if it has one; ``""`` is
    none. Its paragraphs are passages; where one is ``---``, those before it are a rung, a primer of their own: segments
    are encoded behind the one that fits their place, or under ``Policy(rungs=False)`` behind the middle one.
    ``kernels`` says whether steps are run by kernels: by default on a GPU with Triton; ``"on"`` elsewhere runs their
    slow references. ``graphs`` records
    small steps on a GPU before the engine is ready. ``workers`` counts processes with a replica of the model each,
    this one included; ``memory`` in bytes and ``threads`` are each one's own. ``launcher`` starts them on this host
    (``"processes"``) or over the hosts of a Ray cluster (``"ray"``).

    Raises:
        ConfigError: a value lies outside its range.
    """

    device: str = "auto"
    dtype: str = "auto"
    memory: int | float | str = 0.5
    max_context: int | None = None
    max_running: int = 64
    max_step_tokens: int | None = None
    page_size: int = 16
    typical_segment_tokens: int = 512
    store: str | None = None
    storage: str = "lossless"
    drop_below: float = 0.0
    ttl: float | str | None = None
    policy: Policy = Policy()
    seed: int = 0
    load_format: str = "safetensors"
    adapter: str | None = None
    primer: str | None = None
    threads: int | None = None
    kernels: str = "auto"
    graphs: bool = True
    workers: int = 1
    launcher: str = "processes"

    def __post_init__(self) -> None:
        settle(self)
        self._settle_kinds()
        if not isinstance(self.device, str):
            raise ConfigError(f"device is {self.device!r}; choose 'auto', 'cpu' or 'cuda'.")
        check_flag("graphs", self.graphs)
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("launcher", self.launcher, LAUNCHERS)
        one_of("storage", self.storage, STORAGES)
        if not isinstance(self.drop_below, (int, float)) or not 0.0 <= self.drop_below < 1.0:
            raise ConfigError(f"drop_below is {self.drop_below!r}; it must be a number from 0 up to 1, 0 for none.")
        one_of("kernels", self.kernels, KERNELS)
        for name in (
            "max_running",
            "max_step_tokens",
            "page_size",
            "typical_segment_tokens",
            "max_context",
            "threads",
            "workers",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, 1 or more.")
        self._check_fits()
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise ConfigError(
                f"adapter is {self.adapter!r}; an engine merges one adapter, given as the name of its folder or "
                "repository: merge several into one beforehand, or run an engine for each."
            )
        if self.primer is not None and not isinstance(self.primer, str):
            raise ConfigError(f"primer is {self.primer!r}; pass a text, '' for none, or None for the checkpoint's own.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed!r}; pass a whole number of at most 64 bits.")
        if self.store is not None and not isinstance(self.store, str):
            raise ConfigError(f"store is {self.store!r}; pass text such as 'device://2GiB'.")
        if not isinstance(self.policy, Policy):
            raise _no_policy(self.policy)
        if self.ttl is not None and not isinstance(self.ttl, str | int | float):
            raise ConfigError(f"ttl is {self.ttl!r}; pass seconds above 0, such as 3600 or 'alice=3600,*=86400'.")
        self.memory_bytes(2**40)
        _ = self.store_bytes, self.ttl_s(None)

    def _settle_kinds(self) -> None:
        """Types and devices of torch, which is not imported here, by their names; the folder of an adapter as text."""
        for name in ("device", "dtype"):
            value = getattr(self, name)
            if type(value).__module__ == "torch":
                object.__setattr__(self, name, str(value).removeprefix("torch."))
        if isinstance(self.adapter, os.PathLike):
            object.__setattr__(self, "adapter", os.fspath(self.adapter))

    def _check_fits(self) -> None:
        """Whether one host can start so many threads and processes."""
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; pass at most {MOST_THREADS}, best the number of cores.")
        most = max(MOST_PROCESSES, os.cpu_count() or 1)
        if self.launcher == "processes" and self.workers > most:
            raise ConfigError(
                f"workers is {self.workers}, each a process with a replica of the model on this host; "
                f"pass at most {most}, best the number of GPUs, or launcher='ray' for several hosts."
            )

    def memory_bytes(self, free_bytes: int) -> int:
        """Size of the pool, given the bytes that are free once the weights are loaded.

        Raises:
            ConfigError: ``memory`` is neither a size nor a share.
        """
        size = _memory(self.memory)
        return int(free_bytes * size) if isinstance(size, float) else size

    def ttl_s(self, namespace: str | None) -> float | None:
        """Seconds after which what is cached in a namespace is forgotten, or ``None``.

        Raises:
            ConfigError: ``ttl`` cannot be read.
        """
        times = _parse_ttl(self.ttl)
        return times.get(namespace, times.get(None))

    @property
    def tiers(self) -> tuple[TierSpec, ...]:
        """Where entries are kept besides the pool."""
        specs = () if self.store is None else parse_store(self.store)
        return tuple(spec for spec in specs if spec.scheme != "device")

    @property
    def store_bytes(self) -> int | None:
        """Cap on what cached entries may hold in the pool, or ``None`` for no cap of their own."""
        specs = () if self.store is None else parse_store(self.store)
        return next((spec.budget_bytes for spec in specs if spec.scheme == "device"), None)

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """From keywords; policy fields (``seam``, ``reuse``...) may stand among them.

        Raises:
            ConfigError: an unknown keyword.
        """
        policy_names = {f.name for f in fields(Policy)}
        known = {f.name for f in fields(cls)}
        unknown = [name for name in settings if name not in known | policy_names]
        if unknown:
            names = sorted(known | policy_names)
            raise ConfigError(
                f"unknown setting {unknown[0]!r}{meant(unknown[0], names)}; known are {', '.join(names)}."
            )
        changes = {name: settings.pop(name) for name in list(settings) if name in policy_names}
        policy = settings.pop("policy", Policy())
        if not isinstance(policy, Policy):
            raise _no_policy(policy)
        return cls(policy=policy.with_(**changes) if changes else policy, **settings)
