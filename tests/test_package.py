"""What is installed: which names a wheel claims, what it asks for, and what ``import hypic`` costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = {"hypic", "hypic_kernels", "hypic_retriever", "hypic_apps"}
# What costs seconds to import, or may not be there.
HEAVY = ("torch", "transformers", "tokenizers", "triton", "faiss", "langchain_core", "llama_index", "fastapi", "rich")


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run("-m", "pip", "wheel", *options, "--wheel-dir", str(folder), ".")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def files(wheel: Path) -> Sequence[str]:
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def metadata(wheel: Path, files: Sequence[str]) -> Message:
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode())


def requirements(metadata: Message) -> list[str]:
    return list(metadata.get_all("Requires-Dist") or [])


def test_a_wheel_claims_no_name_but_ours(files: Sequence[str]) -> None:
    tops = {name.split("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == NAMES
    assert not any(name.split("/")[0] == "tests" for name in files)


def test_a_wheel_holds_all_that_is_under_our_packages(files: Sequence[str]) -> None:
    """Data files too: checkpoints, corpora, type markers."""
    expected = {
        path.relative_to(ROOT / root).as_posix()
        for root in ("", "kernels", "retriever", "apps")
        for name in NAMES
        for path in (ROOT / root / name).rglob("*")
        if path.is_file() and not any(part == "__pycache__" or part[0] == "." for part in path.relative_to(ROOT).parts)
    }
    assert "hypic/py.typed" in expected
    assert expected <= set(files)


def test_a_wheel_carries_licence_and_command(files: Sequence[str], metadata: Message, wheel: Path) -> None:
    for name in ("LICENSE", "NOTICE"):
        assert any(file.endswith(f".dist-info/licenses/{name}") for file in files)
    (entry_points,) = (name for name in files if name.endswith("entry_points.txt"))
    assert "hypic = hypic_apps.cli.main:main" in zipfile.ZipFile(wheel).read(entry_points).decode()
    assert metadata["License-Expression"] == "Apache-2.0"


def test_nothing_is_pinned(metadata: Message) -> None:
    """An exact version of torch or triton would replace the ones that a user's GPU needs."""
    assert any(line.startswith("torch>=") for line in requirements(metadata))
    assert not [line for line in requirements(metadata) if "==" in line.split(";")[0]]
    triton = [line for line in requirements(metadata) if re.match(r"triton\b", line)]
    assert triton and all(re.match(r"triton *;", line) and "'dev'" in line for line in triton)


def test_the_gpu_extra_is_fla_core_alone(metadata: Message) -> None:
    assert [line.split(";")[0].strip() for line in requirements(metadata) if "'gpu'" in line] == ["fla-core"]
    assert set(metadata.get_all("Provides-Extra") or []) == {
        *("langchain", "llamaindex", "retriever", "apps", "bench", "ray", "gpu", "dev", "all")
    }


def test_installing_it_leaves_what_is_there_alone(wheel: Path, tmp_path: Path) -> None:
    """With our requirements met, an installation changes no other package: not torch, triton or numpy."""
    report = tmp_path / "report.json"
    command = ("-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", str(report), str(wheel))
    run(*command)
    installed = json.loads(report.read_text())["install"]
    assert {entry["metadata"]["name"] for entry in installed} <= {"hypic"}


def test_import_hypic_is_light() -> None:
    code = "import sys; before = set(sys.modules); import hypic; print(*(set(sys.modules) - before))"
    loaded = set(run("-c", code).split())
    assert "hypic.types" in loaded
    assert not loaded & set(HEAVY)
    # Bites: the same measurement sees a heavy import.
    assert "rich" in run("-c", code.replace("import hypic", "import rich")).split()


def test_the_version_stands_once() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject and not re.search(r"^version *=", pyproject, re.MULTILINE)
    version = run("-c", "import hypic; print(hypic.__version__)").strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_triton_is_pinned_in_the_constraints_only() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[a-z0-9_-]+==[0-9.]+", line) for line in pins)
    assert any(line.startswith("triton==") for line in pins)
    assert not re.search(r"triton *[=<>~]=", (ROOT / "pyproject.toml").read_text())
