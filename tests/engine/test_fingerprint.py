"""A checkpoint's fingerprint is its content: moved, downloaded again, tuned, edited in place; what is remembered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hypic.engine import fingerprint, weights
from hypic.errors import CheckpointError
from tests.checkpoints import qwen

LONG_AGO_NS = 10**18


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are remembered: a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -(10**18))  # every file counts as settled
    return tmp_path / "cache" / "hypic" / "digests.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return qwen(tmp_path / "checkpoint")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to be hashed."""
    seen: list[str] = []
    sound = fingerprint._read

    def counted(path: Path) -> str:
        seen.append(path.name)
        return sound(path)

    monkeypatch.setattr(fingerprint, "_read", counted)
    return seen


def of(folder: Path) -> str:
    return fingerprint.of_checkpoint(weights.read_config(folder), weights.shards(folder))


def tune(folder: Path) -> None:
    """Another number somewhere, in a file of the same size."""
    file = folder / "model.safetensors"
    size, tensors = file.stat().st_size, load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == size


def edit(folder: Path) -> None:
    """One bit of the file as it lies there, its time of change put back."""
    file = folder / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


# -- content ---------------------------------------------------------------------------------------------------------


def test_moved_and_copied_checkpoints_keep_it(folder: Path, memory: Path, tmp_path: Path) -> None:
    before = of(folder)
    copied = shutil.copytree(folder, tmp_path / "again")
    os.utime(copied / "model.safetensors", (1, 1))
    moved = folder.rename(tmp_path / "moved")
    assert before == of(copied) == of(moved)


@pytest.mark.parametrize("change", [tune, edit])
def test_changed_weights_are_noticed(change: Callable[[Path], None], folder: Path, memory: Path) -> None:
    before = of(folder)
    assert of(folder) == before and memory.exists(), "it is remembered before it is changed"
    change(folder)
    assert of(folder) != before


def test_the_configuration_counts_and_the_tokenizer_does_not(folder: Path, memory: Path) -> None:
    before, file = of(folder), folder / "config.json"
    (folder / "tokenizer.json").write_text("{}")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "_name_or_path": "there"}))
    assert of(folder) == before
    file.write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert of(folder) != before


def test_names_of_shards_do_not_count(folder: Path, memory: Path, tmp_path: Path) -> None:
    before = of(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert of(folder) == before


# -- a Hub cache -----------------------------------------------------------------------------------------------------


def as_hub_cache(folder: Path, cache: Path, name: str | None = None) -> Path:
    """The layout of a Hub cache: snapshots hold links into ``blobs``, which are named by their SHA-256."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    content = (folder / "model.safetensors").read_bytes()
    blob = blobs / (name or hashlib.sha256(content).hexdigest())
    blob.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    shutil.copy(folder / "config.json", snapshot)
    return snapshot


def test_a_blob_s_name_is_its_digest(folder: Path, memory: Path, tmp_path: Path, reads: list[str]) -> None:
    snapshot = as_hub_cache(folder, tmp_path / "models--org--name")
    found = of(snapshot)
    assert reads == [] and not memory.exists()
    assert found == of(folder) and reads == ["model.safetensors"]


@pytest.mark.parametrize("name", ["a" * 40, "G" * 64, "weights"])
def test_other_links_are_read(name: str, folder: Path, memory: Path, tmp_path: Path, reads: list[str]) -> None:
    assert of(as_hub_cache(folder, tmp_path / "cache-of-hub", name)) == of(folder)
    assert len(reads) == 2


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_a_file_is_read_once(folder: Path, memory: Path, reads: list[str]) -> None:
    assert of(folder) == of(folder) and reads == ["model.safetensors"]
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    assert [path.name for path in memory.parent.iterdir()] == ["digests.json"]


@pytest.mark.parametrize("field", range(5))
def test_nothing_is_trusted_if_anything_differs(field: int, folder: Path, memory: Path, reads: list[str]) -> None:
    before = of(folder)
    known = json.loads(memory.read_text())
    (entry,) = known.values()
    entry[field], entry[5] = entry[field] + 1, "0" * 64
    memory.write_text(json.dumps(known))
    assert of(folder) == before and len(reads) == 2


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}', '{"x": [1, 2]}'])
def test_a_broken_memory_is_no_memory(content: str, folder: Path, memory: Path, reads: list[str]) -> None:
    before = of(folder)
    memory.write_text(content)
    assert of(folder) == before and len(reads) == 2
    assert of(folder) == before and len(reads) == 2, "it was written anew"


def test_a_memory_that_others_can_write_is_not_read(folder: Path, memory: Path, reads: list[str]) -> None:
    of(folder)
    memory.chmod(0o666)
    of(folder)
    assert len(reads) == 2


def test_a_digest_that_is_none_is_not_taken(folder: Path, memory: Path, reads: list[str]) -> None:
    before = of(folder)
    known = json.loads(memory.read_text())
    memory.write_text(json.dumps({path: [*entry[:5], "../../x"] for path, entry in known.items()}))
    assert of(folder) == before and len(reads) == 2


def test_a_fresh_file_is_not_remembered(
    folder: Path, memory: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could change again within one tick of the clock that its times are taken from."""
    monkeypatch.setattr(fingerprint, "SETTLED_NS", LONG_AGO_NS * 10)
    assert of(folder) == of(folder) and len(reads) == 2


def test_a_place_that_cannot_be_written_is_no_error(
    folder: Path, tmp_path: Path, memory: Path, reads: list[str]
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert of(folder) == of(folder) and len(reads) == 2


def test_a_file_that_changes_while_it_is_read(folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(path: Path) -> str:
        path.write_bytes(path.read_bytes() + b"more")
        return "0" * 64

    monkeypatch.setattr(fingerprint, "_read", slow)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        of(folder)


def test_large_files_take_little_memory(tmp_path: Path, memory: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as handle:
        handle.truncate(200_000_000)
    tracemalloc.start()
    digest = fingerprint.file_digest(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000
    assert digest == hashlib.sha256(bytes(200_000_000)).hexdigest()
