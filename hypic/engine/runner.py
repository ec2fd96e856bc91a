"""One device: a model and its pool. A batch in, logits out; entries and states are written to the pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hypic.config import EngineConfig
from hypic.engine import adapter, models, weights
from hypic.engine.batch import Batch, Chain, chain_tokens
from hypic.engine.free_memory import free_bytes, is_out_of_memory
from hypic.engine.graphs import Graphs
from hypic.engine.kernel_batch import Geometry, pack
from hypic.engine.kernel_choice import geometry_of, path_of
from hypic.engine.layers.projections import expose_all, join_all
from hypic.engine.models import Model
from hypic.engine.pool import Layout, Pool
from hypic.engine.read_back import ReadBack
from hypic.engine.rehearsal import Limits, plan_rows, rehearse
from hypic.engine.sampler import Likeliest, SampledToken
from hypic.engine.sampling_state import on
from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.shares import step_tokens
from hypic.engine.sizing import ahead_of, split_of
from hypic.engine.storage import StorageForm
from hypic.errors import CheckpointError, ConfigError
from hypic_kernels.trust import LostDeviceError

logger = logging.getLogger("hypic")
SMALL_WEIGHTS = 2_000_000_000
# Multiplications and additions below which a step on a CPU is faster on one thread (measured on 2 cores).
SMALL_STEP = 6_000_000_000


@dataclass(frozen=True)
class StepResult:
    """``logits [R, vocab]`` of the chains that wanted them, in order; numbers of the chains that are not finite; and
    what was ``sampled`` from the logits, if anything was."""

    logits: Tensor
    broken: frozenset[int]
    sampled: Sequence[SampledToken] = ()


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be at: ``logits [R, vocab]``, and ``is_finite [N]`` of its tokens, which are
    ``spans`` of its chains. A recorded step has ``known`` its likeliest tokens, and what the host reads of it
    ``together``. All are overwritten by the next step."""

    logits: Tensor
    is_finite: Tensor
    spans: Sequence[slice]
    known: Likeliest | None = None
    together: Tensor | None = None

    @torch.inference_mode()
    def only(self, numbers: Sequence[int]) -> Launched:
        """Of some of the chains, all of which wanted logits."""
        at, known = on(self.logits.device, numbers, torch.long), self.known
        return Launched(
            self.logits.index_select(0, at),
            self.is_finite,
            [self.spans[number] for number in numbers],
            None if known is None else Likeliest(*(tensor.index_select(0, at) for tensor in known)),
        )

    def broken(self, is_finite: Tensor) -> frozenset[int]:
        """Numbers of the chains that are not finite, from what the host has read."""
        whole = is_finite.numpy()
        if whole.all():  # what padding computed may be anything, and says nothing
            return frozenset()
        return frozenset(number for number, span in enumerate(self.spans) if not whole[span].all())


@dataclass(frozen=True)
class Runner:
    """See the module's docstring. With a ``geometry`` steps are run by kernels, and small ones from ``graphs``."""

    model: Model
    pool: Pool
    identity: Identity
    max_context: int
    weight_bytes: int
    geometry: Geometry | None = None
    graphs: Graphs | None = None
    primers: tuple[CachedSegment, ...] = ()

    @torch.inference_mode()
    def prepare_thread(self, step_tokens: int) -> None:
        """What each thread that runs steps has to make for itself, of up to ``step_tokens``: plans of long rows."""
        if self.geometry is not None and self.geometry.paged:
            plan_rows(self.model.dense_heads, min(step_tokens, self.max_context))

    def run(self, chains: Sequence[Chain]) -> StepResult:
        """One forward over all chains of a step, waited for."""
        launched = self.launch(chains)
        (is_finite,) = ReadBack([launched.is_finite]).wait()
        return StepResult(launched.logits, launched.broken(is_finite))

    def launch(self, chains: Sequence[Chain], ids: Tensor | None = None) -> Launched:
        """Hand a step to the device; nothing is read back. ``ids [N]`` are its tokens where only the device knows them,
        and those of the chains are none."""
        num_weights = self.weight_bytes // self.pool.layout.dtype.itemsize
        work = 2 * num_weights * sum(chain.num_tokens for chain in chains)
        threads = torch.get_num_threads()
        if self.pool.device.type != "cpu" or threads == 1 or work > SMALL_STEP:
            return self._launch(chains, ids)
        torch.set_num_threads(1)  # many small operations: handing each to several threads costs more than it saves
        try:
            return self._launch(chains, ids)
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def _launch(self, chains: Sequence[Chain], ids: Tensor | None) -> Launched:
        left = None if self.graphs is None else self.graphs.run(chains, ids)
        if left is None:
            return Launched(*self._forward(chains, ids), chain_tokens(chains))
        known = Likeliest(left.ids, left.finite)
        return Launched(left.logits, left.is_finite, chain_tokens(chains), known, left.together)

    def _forward(self, chains: Sequence[Chain], ids: Tensor | None) -> tuple[Tensor, Tensor]:
        layout = self.pool.layout
        if self.geometry is not None:
            batch = pack(chains, self.geometry, self.pool)
        else:
            batch = Batch.pack(chains, layout.conv_width, self.pool.device, layout.key_dim)
        if ids is not None:
            batch = replace(batch, ids=ids.to(batch.ids.dtype))
        hidden, is_finite = self.model.forward_final(batch, self.pool)
        return self.model.logits(hidden), is_finite

    @classmethod
    def load(cls, folder: Path, config: EngineConfig) -> Runner:
        """A checkpoint folder on its device.

        Raises:
            UnsupportedModel, CheckpointError: the checkpoint is refused, incomplete or unreadable.
            ConfigError: the device or the memory budget cannot be right.
        """
        device = device_of(config.device)
        settings = weights.read_config(folder)
        with torch.device("meta"):
            model = models.build(settings)
        dtype = dtype_of(config.dtype, settings, model, device)
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        refuse_too_much(config, device, free_bytes(device) - num_weights * dtype.itemsize)
        weights.materialise(model, device, dtype)
        join_all(model)
        if config.load_format == "dummy":
            fingerprint = weights.fill_dummy(model, config.seed, settings)
        else:
            fingerprint = weights.load(model, as_model(model), folder, settings)
        merged = ""
        if config.adapter is not None:
            merged = adapter.merge(model, as_model(model), weights.locate(config.adapter))
        expose_all(model)
        form = StorageForm.of(config.storage, float(config.drop_below))
        identity = Identity(fingerprint, str(dtype), form.name, merged)
        return cls._with_pool(as_model(model), identity, form, config, device)

    @classmethod
    def _with_pool(
        cls, model: Model, identity: Identity, form: StorageForm, config: EngineConfig, device: torch.device
    ) -> Runner:
        layout, budget = model.layout, config.memory_bytes(free_bytes(device))
        context, _ = split_of(layout, model.max_context, budget, config)
        geometry = geometry_of(model, layout, config.kernels, device)
        ahead = ahead_of(layout, budget, context, replace(config, device=device.type))
        pool = _pool(layout, budget, context, config, device, form, ahead)
        _log_split(pool, _num_bytes(model), device)
        identity = replace(identity, path=path_of(geometry, device))
        made = cls(model, pool, identity, context, _num_bytes(model), geometry)
        if geometry is None or device.type != "cuda":
            return made
        rehearse(made.run, pool, Limits.of(geometry, step_tokens(config, device), config.max_running))
        torch.cuda.empty_cache()  # what is recorded cannot give back what the largest step took
        return replace(made, graphs=_graphs(model, pool, geometry, config))


@torch.inference_mode()
def _graphs(model: Model, pool: Pool, geometry: Geometry, config: EngineConfig) -> Graphs | None:
    if not config.graphs or not model.is_recordable:
        return None
    graphs = Graphs(model, pool, geometry)
    try:
        graphs.record(config.max_running, step_tokens(config, pool.device))
    except LostDeviceError:
        raise
    except RuntimeError as fault:  # of torch: something in the step asks the host after all
        logger.warning("steps are launched one kernel at a time, since they could not be recorded: %s", fault)
        return None
    return graphs


def as_model(module: nn.Module) -> Model:
    return module  # type: ignore[return-value]


def _log_split(pool: Pool, weight_bytes: int, device: torch.device) -> None:
    layout, mib = pool.layout, 2**20
    logger.info(
        "%s: weights %d MiB, pages %d MiB (%d tokens), states %d MiB (%d), transitions %d MiB (%d)",
        device,
        weight_bytes // mib,
        pool.num_pages * pool.page_bytes // mib,
        pool.num_pages * pool.page_size,
        pool.num_states * layout.state_bytes // mib,
        pool.num_states,
        pool.num_transitions * layout.transition_bytes // mib,
        pool.num_transitions,
    )


def _num_bytes(model: Model) -> int:
    assert isinstance(model, nn.Module)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def refuse_too_much(config: EngineConfig, device: torch.device, num_free: int) -> None:
    """Before anything is loaded or taken: a number of bytes that is more than what would be free beside the weights.

    Raises:
        ConfigError: it is.
    """
    budget = config.memory_bytes(max(num_free, 0))
    if budget > num_free and not isinstance(config.memory, float):
        raise too_much(config, budget, device, num_free)


def too_much(config: EngineConfig, budget_bytes: int, device: torch.device, num_free: int) -> ConfigError:
    """What to say of a budget that a device does not have."""
    return ConfigError(
        f"memory is {config.memory!r}, {budget_bytes} bytes, and beside the weights {max(num_free, 0)} bytes are free "
        f"on {device}; pass less than that, or a share of what is free such as memory=0.5."
    )


def _pool(
    layout: Layout, budget: int, context: int, config: EngineConfig, device: torch.device, form: StorageForm, ahead: int
) -> Pool:
    """The pool, or one sentence; what was taken of it is free again then.

    Raises:
        ConfigError: the device has less memory after all: others took it meanwhile, or it lies in pieces.
    """
    try:
        return Pool(
            layout, budget, config.page_size, context, config.max_running, device, form, config.typical_segment_tokens,
            ahead,
        )  # fmt: skip
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault, device):
            raise
    # Not while the fault is handled: its traceback holds what was allocated.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise too_much(config, budget, device, free_bytes(device))


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; choose 'auto', 'cpu' or 'cuda'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r} and torch sees no GPU; choose 'cpu' or install a CUDA build of torch.")
    return device


def dtype_of(name: str, settings: dict[str, object], model: nn.Module, device: torch.device) -> torch.dtype:
    """The configured type; by default the checkpoint's, and fp32 for small models on a CPU."""
    if name == "auto":
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        text = models.text_config(settings)
        declared = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
        name = "float32" if device.type == "cpu" and num_weights < SMALL_WEIGHTS else declared
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"config.json has dtype {name!r}, which torch does not know; pass dtype=.")
    return dtype
