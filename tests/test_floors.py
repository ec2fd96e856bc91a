"""Imports go down only: the floors and third-party rooms of ARCHITECTURE.md, read from the source.

Every import statement counts, inside functions and under TYPE_CHECKING too. A new module fails here until
it is given a floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.import_reading import MODULES, OURS, imports, reads_environment, within

# A room may import what stands on a lower floor, and itself; rooms on one floor never meet.
FLOORS: Sequence[tuple[str, ...]] = (
    ("hypic_kernels",),
    ("hypic.version",),
    ("hypic.errors",),
    ("hypic.policy",),
    ("hypic.types", "hypic.kept"),
    ("hypic.store_spec", "hypic.arguments"),
    ("hypic.config",),
    ("hypic.engine.affine",),
    ("hypic.engine.linear",),
    ("hypic.engine.token_ids",),
    ("hypic.engine.id_memory",),
    ("hypic.engine.free_memory",),
    ("hypic.engine.segment",),
    ("hypic.engine.storage",),
    ("hypic.engine.slot_table",),
    ("hypic.engine.layout", "hypic.engine.stacks"),
    ("hypic.engine.sizing",),
    ("hypic.engine.pool",),
    ("hypic.engine.prefix_hash",),
    ("hypic.engine.opening",),
    ("hypic.engine.plan",),
    ("hypic.engine.chain",),
    ("hypic.engine.conv_plan", "hypic.engine.scan_plan", "hypic.engine.run_arrays"),
    ("hypic.engine.conv_arrays",),
    ("hypic.engine.kernel_arrays",),
    ("hypic.engine.kernel_buffer",),
    ("hypic.engine.kernel_plan",),
    ("hypic.engine.batch",),
    ("hypic.engine.kernel_tiles",),
    ("hypic.engine.kernel_batch",),
    ("hypic.engine.fingerprint",),
    ("hypic.engine.weights",),
    ("hypic.engine.adapter",),
    ("hypic.engine.layers",),
    ("hypic.engine.models", "hypic.engine.store", "hypic.engine.parallel"),
    ("hypic.engine.messages",),
    ("hypic.engine.rendering",),
    ("hypic.engine.vocabulary",),
    ("hypic.engine.tokenizer",),
    ("hypic.engine.detokenizer",),
    ("hypic.engine.read_back",),
    ("hypic.engine.sampling_state",),
    ("hypic.engine.sampler",),
    ("hypic.engine.kernel_choice",),
    ("hypic.engine.graphs",),
    ("hypic.engine.rehearsal",),
    ("hypic.engine.shares",),
    ("hypic.engine.runner",),
    ("hypic.engine.primer", "hypic.engine.speed"),
    ("hypic.engine.request", "hypic.engine.task"),
    ("hypic.engine.answer", "hypic.engine.encode"),
    ("hypic.engine.jobs", "hypic.engine.work"),
    ("hypic.engine.lookup",),
    ("hypic.engine.admission",),
    ("hypic.engine.snapshots", "hypic.engine.step_limit", "hypic.engine.waiting"),
    ("hypic.engine.scheduler",),
    ("hypic.engine.ahead",),
    ("hypic.engine.report",),
    ("hypic.engine.watch",),
    ("hypic.engine.engine",),
    ("hypic.engine.forget",),
    ("hypic.engine.inspect",),
    ("hypic.engine.loop",),
    ("hypic.engine.parcel",),
    ("hypic.engine.payload",),
    ("hypic.engine.trust",),
    ("hypic.engine.arrivals", "hypic.engine.own_work", "hypic.engine.asking"),
    ("hypic.engine.placing",),
    ("hypic.engine.peers",),
    ("hypic.engine.calibrate",),
    ("hypic.engine.lending",),
    ("hypic.engine.speech",),
    ("hypic.engine.worker",),
    ("hypic.engine.router",),
    ("hypic.engine.workers",),
    ("hypic.engine.starting",),
    ("hypic.checkpoints",),
    ("hypic.registry", "hypic.tool_syntax"),
    ("hypic.tool_calls",),
    ("hypic.stream",),
    ("hypic.compare",),
    ("hypic.turns", "hypic.warming"),
    ("hypic.keeping", "hypic.saved"),
    ("hypic.llm",),
    ("hypic.shared",),
    ("hypic.trace",),
    ("hypic",),
    ("hypic_retriever", "hypic.integrations"),
    ("hypic_apps",),
)
# Packages of no room: they hold a docstring at most.
EMPTY = ("hypic.engine",)

# Of what stands below, these rooms see only so much.
ONLY: Mapping[str, tuple[str, ...]] = {
    "hypic_retriever": (),
    "hypic.integrations": ("hypic",),
    "hypic_apps": ("hypic", "hypic_retriever", "hypic.integrations"),
    "hypic_apps.train": (
        *("hypic", "hypic_retriever", "hypic.integrations", "hypic_kernels"),
        *("hypic.engine.models", "hypic.engine.layers", "hypic.engine.linear", "hypic.engine.affine"),
    ),
    # Floors are counted from a model's modules, and a geometry, which has no tokenizer, is asked by token ids.
    "hypic_apps.bench": ("hypic", "hypic.engine"),
    # What reuse costs shows in states and logits, which no public name gives out.
    "hypic_apps.eval": (
        *("hypic", "hypic.engine.plan", "hypic.engine.shares", "hypic.engine.runner", "hypic.engine.work"),
        *("hypic.engine.engine", "hypic.engine.primer"),
        *(
            "hypic.engine.sampler",
            "hypic.engine.sampling_state",
            "hypic.engine.task",
            "hypic.engine.tokenizer",
            "hypic.engine.weights",
        ),
    ),
}

_TORCH_FREE = (
    "hypic.errors",
    "hypic.policy",
    "hypic.types",
    "hypic.kept",
    "hypic.arguments",
    "hypic.store_spec",
    "hypic.config",
)
_FRAMEWORK_USERS = ("hypic_apps.cli", "hypic_apps.rag")
# Which rooms may import a package of other people.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "triton": ("hypic_kernels",),
    "fla": ("hypic_kernels",),
    "torch.distributed": ("hypic.engine.parallel", "hypic_apps.train.replicas"),
    "ray": ("hypic.engine.parallel",),
    "transformers": ("hypic.engine.tokenizer", "hypic_apps.bench.peers"),
    "tokenizers": ("hypic.engine.tokenizer", "hypic.engine.vocabulary", "hypic_retriever", "hypic_apps.train"),
    "safetensors": ("hypic.engine.weights", "hypic.engine.store", "hypic_retriever", "hypic_apps.train"),
    "huggingface_hub": ("hypic.engine.weights", "hypic.engine.store", "hypic_retriever"),
    "faiss": ("hypic_retriever",),
    "fastapi": ("hypic_apps",),
    "uvicorn": ("hypic_apps",),
    "pydantic": ("hypic_apps", "hypic.integrations"),
    "langchain": ("hypic.integrations.langchain", *_FRAMEWORK_USERS),
    "langchain_core": ("hypic.integrations.langchain", *_FRAMEWORK_USERS),
    "langgraph": ("hypic.integrations.langchain", *_FRAMEWORK_USERS),
    "llama_index": ("hypic.integrations.llamaindex", *_FRAMEWORK_USERS),
    "httpx": ("hypic.integrations.remote",),
    "xxhash": ("hypic.engine.store",),
}


def room_of(module: str) -> str:
    """The longest room that holds a module; ``hypic`` itself holds only its public names."""
    rooms = [room for floor in FLOORS for room in floor if within(module, room) and (room != "hypic" or module == room)]
    assert rooms, f"{module} has no floor; give it one in tests/test_floors.py and ARCHITECTURE.md"
    return max(rooms, key=len)


def floor_of(room: str) -> int:
    return next(n for n, floor in enumerate(FLOORS) if room in floor)


def is_seen(target: str, allowed: Sequence[str]) -> bool:
    """Whether a room that sees only so much sees ``target``; ``hypic`` stands for all of it but the engine."""
    return any(within(target, room) and (room != "hypic" or not within(target, "hypic.engine")) for room in allowed)


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module imports and may not, one sentence each."""
    room, found = room_of(module), []
    only = max((name for name in ONLY if within(module, name)), key=len, default=None)
    for target in imports(module, source, is_package):
        if target.split(".")[0] in OURS:
            other = room_of(target if target in MODULES or target in OURS else target.rpartition(".")[0])
            if other != room and floor_of(other) >= floor_of(room):
                found.append(f"{module} imports {target}, which stands above or beside it")
            if other != room and only is not None and not is_seen(target, ONLY[only]):
                found.append(f"{module} imports {target}, which is not public to {only}")
            continue
        if within(target, "torch") and module in _TORCH_FREE:
            found.append(f"{module} imports {target}, but must not need torch")
        for package, rooms in ROOMS.items():
            if within(target, package) and not any(within(module, allowed) for allowed in rooms):
                found.append(f"{module} imports {target}, whose room is {' or '.join(rooms)}")
    return found


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(EMPTY)))
def test_imports_keep_to_the_floors(module: str) -> None:
    path = MODULES[module]
    assert faults(module, path.read_text(encoding="utf-8"), path.name == "__init__.py") == []


def test_packages_of_no_room_import_nothing() -> None:
    for module in EMPTY:
        assert not list(imports(module, MODULES[module].read_text(encoding="utf-8"), True))


def test_the_environment_is_read_in_one_place() -> None:
    readers = [name for name, path in MODULES.items() if reads_environment(path.read_text(encoding="utf-8"))]
    assert len(readers) <= 1, readers


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hypic.types", "from hypic.config import EngineConfig"),
        ("hypic.types", "import torch"),
        ("hypic.types", "from torch import Tensor"),
        ("hypic.engine.plan", "from hypic.engine.batch import Batch"),
        ("hypic.engine.plan", "from hypic.engine import batch"),
        ("hypic.engine.plan", "from .batch import Batch"),
        ("hypic.engine.plan", "from . import batch"),
        ("hypic.engine.plan", "import hypic"),
        ("hypic.engine.plan", "from hypic import Segment"),
        ("hypic.engine.plan", "def f():\n    from hypic.engine.sampler import Sampler"),
        ("hypic.engine.plan", "if TYPE_CHECKING:\n    from hypic.engine.sampler import Sampler"),
        ("hypic.engine.models.minimax", "from hypic.engine.store.device import Store"),
        ("hypic_kernels", "from hypic.errors import HypicError"),
        ("hypic_retriever", "from hypic import Segment"),
        ("hypic.integrations", "from hypic.engine.tokenizer import Tokenizer"),
        ("hypic_apps.cli.main", "from hypic.engine.loop import Loop"),
        ("hypic_apps.cli.main", "import hypic_kernels"),
        ("hypic_apps.train.generate", "from hypic.engine.tokenizer import Tokenizer"),
        ("hypic.engine.sampler", "import transformers"),
        ("hypic.engine.layers.attention", "import triton.language as tl"),
        ("hypic.engine.runner", "import torch.distributed as dist"),
        ("hypic.engine.runner", "from torch import distributed"),
        ("hypic.integrations.llamaindex", "from langchain_core.documents import Document"),
        ("hypic_apps.cli.main", "import faiss"),
    ],
)
def test_a_forbidden_import_is_caught(module: str, source: str) -> None:
    assert faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hypic.engine.plan", "from hypic.types import Segment\nfrom hypic import types\nfrom . import affine"),
        ("hypic.engine.models.minimax", "from .qwen3_5_text import Model\nfrom hypic_kernels import gdn"),
        ("hypic.integrations", "from hypic import Segment\nfrom hypic.types import Prompt\nfrom . import langchain"),
        ("hypic_apps.train.generate", "from hypic.engine.layers.attention import Attention"),
        ("hypic.engine.runner", "import torch\nimport torch.nn.functional as F"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert faults(module, source, module == "hypic.integrations") == []


def test_a_module_without_a_floor_is_caught() -> None:
    with pytest.raises(AssertionError, match="has no floor"):
        room_of("hypic.engine.utils")


def test_reading_the_environment_is_caught() -> None:
    assert reads_environment("import os\nx = os.environ['HOME']") and reads_environment("os.getenv('HOME')")
    assert not reads_environment("import os\nx = os.getcwd()") and not reads_environment("os.environ['HOME'] = 'x'")
