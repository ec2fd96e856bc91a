"""The disk tier: what is on disk survives anything, is found again quickly, and is never believed unchecked."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hypic.engine.store import disk, encoding, files
from tests.engine.store.conftest import IDENTITY, make_image, same_images
from tests.engine.store.disks import OTHER, Damage, kept, opened, path_of, read


def test_what_was_kept_comes_back_bit_for_bit_in_the_next_process(tmp_path: Path) -> None:
    images = [make_image(n, 8 + n, namespace=None if n % 2 else "tenant") for n in range(5)]
    kept(opened(tmp_path), *images)
    again = opened(tmp_path)
    assert again.stats.num_entries == 5
    for image in images:
        found = read(again, image)
        assert image.key in again and found is not None and same_images(found, image)
    stored = {one.key: one for one in again.entries()}
    assert all(stored[image.key].labels == image.labels for image in images)
    assert all(stored[image.key].expires_s == image.expires_s for image in images)
    assert again.stats.hits == 5 and again.stats.corrupt == 0


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tier = opened(tmp_path)
        kept(tier, make_image())
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tier.root, tier.folder, path_of(tier, make_image()))]
    assert modes == [0o700, 0o700, 0o600]


def test_the_budget_is_kept_in_real_bytes_and_the_least_used_goes_first(tmp_path: Path) -> None:
    images = [make_image(n) for n in range(6)]
    size = files.real_bytes(len(encoding.encode(images[0])))
    tier = opened(tmp_path, 3 * size + 100)
    kept(tier, *images[:3])
    assert tier.get(images[0].key) is not None and tier.get(images[2].key) is not None
    kept(tier, images[3])
    assert images[1].key not in tier and images[0].key in tier
    kept(tier, *images[4:])
    held = sum(path.stat().st_blocks * 512 for path in tier.folder.iterdir())
    assert held <= tier.budget_bytes and tier.stats.num_entries == 3 and tier.stats.evictions == 3
    assert not tier.put(b"x" * 32, torch.zeros(4 * size, dtype=torch.uint8)), "what can never fit is not tried"


def test_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    images = [make_image(n) for n in range(4)]
    size = files.real_bytes(len(encoding.encode(images[0])))
    first = opened(tmp_path, 3 * size)
    kept(first, *images[:3])
    for age, number in enumerate((1, 2, 0)):  # as time would tell them apart
        os.utime(path_of(first, images[number]), (1e9 + age, 1e9 + age))
    second = opened(tmp_path, 3 * size)
    kept(second, images[3])
    assert images[1].key not in second and images[2].key in second and images[0].key in second


def test_a_smaller_budget_is_kept_from_the_first_write_on(tmp_path: Path) -> None:
    images = [make_image(n) for n in range(5)]
    size = files.real_bytes(len(encoding.encode(images[0])))
    kept(opened(tmp_path), *images[:4])
    tier = opened(tmp_path, 2 * size)
    kept(tier, images[4])
    assert tier.stats.num_entries == 2 and tier.stats.held_bytes <= 2 * size


# -- other models ----------------------------------------------------------------------------------------------------


def test_other_models_entries_are_counted_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(opened(tmp_path), make_image(1), make_image(2))
    with caplog.at_level(logging.INFO, "hypic"):
        other = opened(tmp_path, identity=OTHER)
    assert "0 entries usable" in caplog.text and "2 of other models" in caplog.text
    assert make_image(1).key not in other and other.get(make_image(1).key) is None
    assert other.stats.num_foreign == 2 and other.stats.foreign_bytes > 0
    assert opened(tmp_path).stats.num_entries == 2


def test_other_models_entries_count_against_the_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = files.real_bytes(len(encoding.encode(make_image())))
    kept(opened(tmp_path), make_image(1), make_image(2))
    other = opened(tmp_path, 2 * size, OTHER)
    mine = replace(make_image(3), identity=OTHER)
    assert not other.put(mine.key, encoding.encode(mine))
    assert "other models' entries fill the store" in caplog.text and opened(tmp_path).stats.num_entries == 2
    assert not list(other.folder.iterdir())


def test_everything_that_changes_an_entry_changes_the_folder(tmp_path: Path) -> None:
    identities = [IDENTITY, OTHER, replace(IDENTITY, dtype="x"), replace(IDENTITY, storage="x")]
    identities.append(replace(IDENTITY, adapter="x"))
    assert len({files_of.name for files_of in (disk.folder_of(tmp_path, one) for one in identities)}) == 5


# -- damage ----------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    place = len(data) - 30
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def other_version(data: bytes) -> bytes:
    return data.replace(b'"version":"1"', b'"version":"9"')


DAMAGE: dict[str, Damage] = {
    "truncated": lambda data: data[:-1],
    "truncated in the header": lambda data: data[:300],
    "truncated in the length": lambda data: data[:5],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "bit flipped": flipped,
    "bit flipped in a label": lambda data: data.replace(b'"name":"name 1"', b'"name":"name 3"'),
    "another version": other_version,
    "another model's": lambda data: encoding.encode(replace(make_image(), identity=OTHER)).numpy().tobytes(),
    "another entry's": lambda data: encoding.encode(make_image(2)).numpy().tobytes(),
    "zeros": lambda data: bytes(len(data)),
    "a pickle": lambda data: b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94",
    "a huge header": lambda data: (2**62).to_bytes(8, "little") + data[8:],
}


@pytest.mark.parametrize("when", ["before opening", "after opening"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_with_one_warning_and_is_removed(
    damage: str, when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image, sound = make_image(1), make_image(2)
    first = opened(tmp_path)
    kept(first, image, sound)
    path = path_of(first, image)
    tier = opened(tmp_path) if when == "after opening" else None
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    tier = tier or opened(tmp_path)
    found = read(tier, image)
    if damage == "another model's":  # sound in itself; who asked compares the identity
        assert found is not None and found.identity == OTHER
        return
    assert found is None and image.key not in tier and not path.exists()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1, caplog.text
    assert tier.stats.corrupt == 1
    assert read(tier, image) is None and len(caplog.records) == 1
    kept(tier, image)
    again, other = read(tier, image), read(tier, sound)
    assert again is not None and same_images(again, image) and other is not None and same_images(other, sound)


def test_checksums_are_compared_once_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(opened(tmp_path), make_image())
    tier, counted, sound = opened(tmp_path), [], encoding.checksum

    def counting(buffer: torch.Tensor) -> str:
        counted.append(len(buffer))
        return sound(buffer)

    monkeypatch.setattr(encoding, "checksum", counting)
    for _ in range(3):
        assert tier.get(make_image().key) is not None
    assert len(counted) == 1


def test_a_file_that_goes_is_a_miss_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(tmp_path)
    kept(tier, make_image())
    path_of(tier, make_image()).unlink()
    assert tier.get(make_image().key) is None and make_image().key not in tier and not caplog.records


def test_what_was_read_stays_as_it_is_when_the_file_goes(tmp_path: Path) -> None:
    tier, image = opened(tmp_path), make_image()
    kept(tier, image)
    buffer = tier.get(image.key)
    assert tier.remove(image.key) and not tier.remove(image.key)
    assert buffer is not None and same_images(encoding.decode(buffer), image)


# -- a disk that will not ---------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_nothing_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, images = opened(tmp_path), [make_image(n) for n in range(4)]
    kept(tier, images[0])
    sound, written = os.write, [0]

    def full(descriptor: int, data: bytes) -> int:
        if written[0] > 500:
            raise OSError(28, "No space left on device")
        written[0] += 300
        return sound(descriptor, data[:300])

    monkeypatch.setattr(os, "write", full)
    assert not any(tier.put(image.key, encoding.encode(image)) for image in images[1:])
    monkeypatch.undo()
    assert [path.name for path in tier.folder.iterdir()] == [path_of(tier, images[0]).name]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1 and "No space left" in caplog.text
    found = read(tier, images[0])
    assert found is not None and same_images(found, images[0]), "what is there is still read"
    monkeypatch.setattr(tier, "_paused_until", 0.0)
    kept(tier, images[1])


def test_a_write_in_small_parts_is_a_whole_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: sound(descriptor, data[:101]))
    tier, image = opened(tmp_path), make_image()
    kept(tier, image)
    found = read(opened(tmp_path), image)
    assert found is not None and same_images(found, image)


def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to who may not write; the tests may run as root, who always may."""

    def refuse(*args: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "chmod"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    sound = os.open

    def opening(path: str, flags: int, *args: int) -> int:
        if flags & os.O_CREAT:
            refuse()
        return sound(path, flags, *args)

    monkeypatch.setattr(os, "open", opening)


def test_a_directory_that_cannot_be_written_to_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept(opened(tmp_path), make_image(1))
    refusing(monkeypatch)
    tier = opened(tmp_path)
    assert "cannot be written to" in caplog.text
    found = read(tier, make_image(1))
    assert found is not None and same_images(found, make_image(1))
    assert not tier.put(make_image(2).key, encoding.encode(make_image(2)))
    monkeypatch.setattr(tier, "_paused_until", 0.0)
    assert not tier.put(make_image(2).key, encoding.encode(make_image(2)))


def test_a_root_that_cannot_be_made_is_an_empty_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store").write_text("a file stands here")
    tier = opened(tmp_path)
    assert tier.stats.num_entries == 0 and "cannot be written to" in caplog.text
    assert not tier.put(make_image().key, encoding.encode(make_image())) and tier.get(make_image().key) is None
