"""Byte ranges arrive bit for bit whichever way the kernel allows, and holes stay holes."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from xmac_cli.checkpoint.copying import TRANSFERS, RangeCopier, clone_or_link
from xmac_cli.cli.errors import InputError

MIB = 1 << 20


def copy(source: Path, target: Path, ranges: list[tuple[int, int]], copier: RangeCopier | None = None) -> list[int]:
    """Copy ranges one behind the other into `target`; returns the reported byte counts."""
    reported: list[int] = []
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(descriptor, sum(length for _, length in ranges))
    position = 0
    with copier or RangeCopier() as active:
        for offset, length in ranges:
            active.copy(source, offset, length, descriptor, position, reported.append)
            position += length
    os.close(descriptor)
    return reported


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(1).randbytes(9 * MIB + 123))
    return path


@pytest.fixture
def other_disk() -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.mark.parametrize("way", TRANSFERS, ids=lambda way: way.__name__)
def test_every_way_of_copying_gives_the_same_bytes(source: Path, tmp_path: Path, way: object) -> None:
    raw = source.read_bytes()
    ranges = [(5 * MIB + 1, 3 * MIB), (0, 0), (0, 1), (9 * MIB + 100, 23), (1, 5 * MIB)]
    reported = copy(source, tmp_path / "out", ranges, RangeCopier((way,)))  # type: ignore[arg-type]
    assert (tmp_path / "out").read_bytes() == b"".join(raw[offset : offset + length] for offset, length in ranges)
    assert sum(reported) == sum(length for _, length in ranges)


def test_copies_between_file_systems(source: Path, other_disk: Path, tmp_path: Path) -> None:
    copy(source, other_disk / "out", [(7, 8 * MIB)])
    assert (other_disk / "out").read_bytes() == source.read_bytes()[7 : 7 + 8 * MIB]
    copy(other_disk / "out", tmp_path / "back", [(0, 8 * MIB)])
    assert (tmp_path / "back").read_bytes() == (other_disk / "out").read_bytes()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refusal_falls_through_to_the_next_way_and_is_remembered(source: Path, tmp_path: Path, code: int) -> None:
    calls: list[int] = []

    def refuse(*_: int) -> int:
        calls.append(code)
        raise OSError(code, os.strerror(code))

    copy(source, tmp_path / "out", [(0, 4 * MIB), (5 * MIB, MIB)], RangeCopier((refuse, *TRANSFERS[1:])))
    raw = source.read_bytes()
    assert (tmp_path / "out").read_bytes() == raw[: 4 * MIB] + raw[5 * MIB : 6 * MIB]
    assert calls == [code], "the second range must not ask again"


def test_a_way_that_does_nothing_is_left_for_the_next_one(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "out", [(3, MIB)], RangeCopier((lambda *_: 0, TRANSFERS[2])))
    assert (tmp_path / "out").read_bytes() == source.read_bytes()[3 : 3 + MIB]


def test_a_real_failure_is_not_papered_over(source: Path, tmp_path: Path) -> None:
    def full(*_: int) -> int:
        raise OSError(errno.ENOSPC, "disk full")

    with pytest.raises(OSError, match="disk full"):
        copy(source, tmp_path / "out", [(0, MIB)], RangeCopier((full, *TRANSFERS)))


def test_a_source_that_was_cut_is_an_input_error(source: Path, tmp_path: Path) -> None:
    size = source.stat().st_size
    with pytest.raises(InputError, match="was cut"):
        copy(source, tmp_path / "out", [(size - 10, 20)])
    for way in TRANSFERS:
        with pytest.raises(InputError, match="was cut"):
            copy(source, tmp_path / "out", [(size + 10, 20)], RangeCopier((way,)))


def test_many_sources_need_few_open_files(tmp_path: Path) -> None:
    files = [tmp_path / f"f{number}" for number in range(200)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 3)
    target = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    os.ftruncate(target, 1200)
    before = open_files()
    with RangeCopier() as copier:
        for number, file in enumerate(files + files[::-1]):
            copier.copy(file, 0, 3, target, 3 * number, lambda count: None)
            assert open_files() <= before + 32
    os.close(target)
    expected = b"".join(bytes([number]) * 3 for number in range(200))
    assert (tmp_path / "out").read_bytes() == expected + b"".join(bytes([n]) * 3 for n in reversed(range(200)))
    assert open_files() == before - 1


def test_holes_of_a_sparse_file_stay_holes(tmp_path: Path) -> None:
    source = tmp_path / "sparse"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        for offset, text in ((0, b"begin"), (20 * MIB + 5, b"middle"), (64 * MIB - 3, b"end")):
            file.seek(offset)
            file.write(text)
        os.fsync(file.fileno())
    if source.stat().st_blocks * 512 >= source.stat().st_size:
        pytest.skip("the file system keeps no holes")
    ranges = [(0, 64 * MIB), (20 * MIB, 10), (30 * MIB, 5 * MIB), (63 * MIB, MIB)]
    reported = copy(source, tmp_path / "out", ranges)
    raw = source.read_bytes()
    assert (tmp_path / "out").read_bytes() == b"".join(raw[offset : offset + length] for offset, length in ranges)
    assert sum(reported) == sum(length for _, length in ranges)
    assert (tmp_path / "out").stat().st_blocks * 512 < MIB


def test_linking_shares_the_storage_or_says_that_it_cannot(source: Path, other_disk: Path, tmp_path: Path) -> None:
    assert clone_or_link(source, tmp_path / "linked")
    assert (tmp_path / "linked").read_bytes() == source.read_bytes()
    assert not clone_or_link(source, other_disk / "linked")
    assert not (other_disk / "linked").exists()


def test_linking_through_a_symbolic_link_shares_the_file_and_not_the_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(source)
    assert clone_or_link(tmp_path / "alias", tmp_path / "linked")
    assert not (tmp_path / "linked").is_symlink()
    assert (tmp_path / "linked").read_bytes() == source.read_bytes()
