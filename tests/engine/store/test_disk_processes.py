"""Several processes on one root, killed at any time; and very many entries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hypic.engine.store import disk, encoding, files
from hypic.engine.store.disk import DiskTier
from tests.engine.store.conftest import IDENTITY, make_image, same_images
from tests.engine.store.disks import BUDGET, opened, read

# One process that has imported everything forks the writers: kill -9 ends a writer, and the next is there at once.
NURSERY = """
import os, sys
sys.path[:0] = sys.argv[5:]
from pathlib import Path
import torch
from hypic.engine.store import encoding
from hypic.engine.store.disk import DiskTier
from tests.engine.store.conftest import IDENTITY, make_image
torch.set_num_threads(1)
images = [make_image(number, 40) for number in range(*map(int, sys.argv[2:4]))]
buffers = [(image.key, encoding.encode(image)) for image in images]
print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
        continue
    tier = DiskTier(Path(sys.argv[1]), int(sys.argv[4]), IDENTITY)
    while True:
        for key, buffer in buffers:
            tier.put(key, buffer)
            if tier.get(key) is not None and key[0] % 2:
                tier.remove(key)
"""


class Nursery:
    """Starts one writer after the other; ``kill`` returns when it is gone."""

    def __init__(self, root: Path, last: int, budget: int) -> None:
        arguments = [str(root), "0", str(last), str(budget), *filter(None, sys.path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", NURSERY, *arguments], **pipes)  # type: ignore[call-overload]
        assert self._line() == "ready"

    def _line(self) -> str:
        return str(self.process.stdout.readline().strip())

    def start(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.child = int(self._line())

    def kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        assert self._line() == "gone"

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def killed_while_writing(root: Path, times: int) -> None:
    nursery, num_found = Nursery(root, 30, BUDGET), 0
    for number in range(times):
        nursery.start()
        time.sleep(0.01 + 0.007 * (number % 17))
        nursery.kill()
        tier = DiskTier(root, BUDGET, IDENTITY)
        for image in (make_image(n, 40) for n in range(number % 3, 30, 3)):
            found = read(tier, image)
            assert found is None or same_images(found, image)
            num_found += found is not None
        assert tier.stats.corrupt == 0, "a name stands for a whole file"
        assert not [path for path in tier.folder.iterdir() if path.name.startswith(".")]
    nursery.close()
    assert num_found > 0


def test_killed_while_writing(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 5)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_while_writing_two_hundred_times(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 200)


def test_two_processes_on_one_root(tmp_path: Path) -> None:
    """They write, read and remove the same entries and evict each other's; nobody ever reads anything wrong."""
    images = [make_image(n, 40) for n in range(20)]
    size = files.real_bytes(len(encoding.encode(images[0])))
    nursery = Nursery(tmp_path, 20, 12 * size)
    nursery.start()
    try:
        tier = DiskTier(tmp_path, 12 * size, IDENTITY)
        started, num_read, most = time.monotonic(), 0, 0
        while (spent_s := time.monotonic() - started) < 2.0 or (num_read <= 20 and spent_s < 30.0):
            for image in images:
                found = read(tier, image) if tier.find(image.key) is not None else None
                assert found is None or same_images(found, image)
                num_read += found is not None
                tier.put(image.key, encoding.encode(image))
            whole = [p for p in tier.folder.iterdir() if not p.name.startswith(".")]
            most = max(most, len(whole))
        assert num_read > 20 and tier.stats.corrupt == 0
        assert most <= 13, "both keep to the budget, but for what is being looked at"
    finally:
        nursery.kill()
        nursery.close()


def test_an_entry_that_is_found_before_its_writer_is_done_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, tier = make_image(1, 40), opened(tmp_path)
    sound = disk.sync

    def looked_at(folder: Path) -> None:
        sound(folder)
        assert tier.find(image.key) is not None

    monkeypatch.setattr(disk, "sync", looked_at)
    assert tier.put(image.key, encoding.encode(image))
    assert tier.stats.num_entries == 1 and tier.stats.held_bytes == files.real_bytes(len(encoding.encode(image)))


def test_a_temporary_file_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    living = tier.folder / f".aa.{os.getppid()}.0.tmp"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stray = tier.folder / f".aa.{dead.pid}.0.tmp"
    old = tier.folder / f".bb.{os.getppid()}.0.tmp"
    for path in (living, stray, old):
        path.write_bytes(b"half of an entry")
    os.utime(old, (1e9, 1e9))
    opened(tmp_path)
    assert living.exists() and not stray.exists() and not old.exists()


# -- many ------------------------------------------------------------------------------------------------------------


def test_ten_thousand_entries_are_opened_in_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and the beginnings of files are read, no contents; budget and order of use are there at once."""
    tier = opened(tmp_path)
    data = bytearray(encoding.encode(make_image()).numpy().tobytes())
    place = bytes(data).index(b'"key":"') + len(b'"key":"')
    for number in range(10_000):
        key = number.to_bytes(32, "big").hex().encode()
        data[place : place + 64] = key
        (tier.folder / f"{key.decode()}.safetensors").write_bytes(data)
    monkeypatch.setattr(disk, "mapped", None)
    began = time.process_time()  # other work on the machine is not this one's
    again = opened(tmp_path, 2**40)
    took_s = time.process_time() - began
    assert again.stats.num_entries == 10_000 and again.stats.corrupt == 0
    assert again.stats.held_bytes == 10_000 * files.real_bytes(len(data))
    assert took_s < 2.0, took_s
