"""Moving byte ranges between files inside the kernel, so that weights never pass through Python memory.

`copy_file_range` first (shares blocks on btrfs and XFS), `sendfile` where a file system or kernel refuses it, read and
write in 4 MB pieces where both are refused. All three give the same bytes. Holes of sparse files stay holes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from xmac_cli.checkpoint.files import open_regular
from xmac_cli.cli.errors import InputError

_CALL_BYTES = 16 << 20
_BUFFER_BYTES = 4 << 20
_MAX_OPEN_FILES = 32
_FICLONE = 0x40049409
# What kernels and file systems answer when they cannot do it at all, as opposed to a failure while doing it.
_UNABLE = frozenset(
    (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ENOTTY, errno.ENOTSOCK)
)

Transfer = Callable[[int, int, int, int, int], int]


def _by_copy_file_range(source: int, target: int, offset: int, target_offset: int, length: int) -> int:
    return os.copy_file_range(source, target, length, offset, target_offset)


def _by_sendfile(source: int, target: int, offset: int, target_offset: int, length: int) -> int:
    os.lseek(target, target_offset, os.SEEK_SET)
    return os.sendfile(target, source, offset, length)


def _by_read_write(source: int, target: int, offset: int, target_offset: int, length: int) -> int:
    data = os.pread(source, min(length, _BUFFER_BYTES), offset)
    write_all(target, data, target_offset)
    return len(data)


_WAYS = (("copy_file_range", _by_copy_file_range), ("sendfile", _by_sendfile), ("pread", _by_read_write))
TRANSFERS: tuple[Transfer, ...] = tuple(way for call, way in _WAYS if hasattr(os, call))


def write_all(target: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of the open file `target`."""
    view = memoryview(data)
    while view:
        count = os.pwrite(target, view[:_CALL_BYTES], offset)
        view = view[count:]
        offset += count


class RangeCopier:
    """Copies byte ranges of any number of source files, keeping a bounded number of them open.

    Args:
        transfers: ways to move bytes, best first; one that turns out impossible for a pair of files is skipped for it.
    """

    def __init__(self, transfers: tuple[Transfer, ...] = TRANSFERS) -> None:
        self._transfers = transfers
        self._first_usable: dict[tuple[int, int], int] = {}
        self._open: dict[Path, int] = {}

    def __enter__(self) -> RangeCopier:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def copy(
        self, file: Path, offset: int, length: int, target: int, target_offset: int, on_bytes: Callable[[int], None]
    ) -> None:
        """Copy `length` bytes of `file` at `offset` to the open file `target` at `target_offset`.

        Args:
            target: must already have its final size; where the source has a hole nothing is written.
            on_bytes: called with the number of bytes done since the last call, holes included.

        Raises:
            InputError: `file` is shorter than `offset + length`.
        """
        source = self._descriptor(file)
        for kind, start, end in _extents(source, offset, offset + length):
            if kind == "hole":
                on_bytes(end - start)
                continue
            self._copy_extent(source, start, end, target, target_offset + start - offset, on_bytes, file)

    def _copy_extent(
        self, source: int, start: int, end: int, target: int, at: int, on_bytes: Callable[[int], None], file: Path
    ) -> None:
        devices = (os.fstat(source).st_dev, os.fstat(target).st_dev)
        way = self._first_usable.get(devices, 0)
        while start < end:
            try:
                count = self._transfers[way](source, target, start, at, min(end - start, _CALL_BYTES))
            except OSError as error:
                if error.errno not in _UNABLE or way + 1 == len(self._transfers):
                    raise
                count = -1
            if count == 0 and os.fstat(source).st_size < end:
                raise InputError(f"{file} ended at byte {start:,}; it was cut while it was copied")
            if count <= 0:  # some virtual file systems answer 0 instead of an error
                if way + 1 == len(self._transfers):
                    raise InputError(f"{file} cannot be read at byte {start:,}")
                way = self._first_usable[devices] = way + 1
                continue
            start += count
            at += count
            on_bytes(count)

    def _descriptor(self, file: Path) -> int:
        if file in self._open:
            return self._open[file]
        if len(self._open) >= _MAX_OPEN_FILES:
            oldest = next(iter(self._open))
            os.close(self._open.pop(oldest))
        self._open[file] = open_regular(file)
        return self._open[file]


def clone_or_link(source: Path, target: Path) -> bool:
    """Make `target` (which must not exist) share the storage of `source`: reflink, else hard link.

    Returns:
        False when the file systems allow neither; `target` then does not exist.
    """
    real = Path(os.path.realpath(source))
    descriptor = open_regular(real)
    try:
        clone = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(clone, _FICLONE, descriptor)
            return True
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
        finally:
            os.close(clone)
    finally:
        os.close(descriptor)
    target.unlink()
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno in _UNABLE or error.errno in (errno.EMLINK, errno.EACCES):
            return False
        raise
    return True


def _extents(source: int, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield ("data" or "hole", begin, end) in order; a file without holes is one data extent."""
    status = os.fstat(source)
    if status.st_size < end or status.st_blocks * 512 >= status.st_size:
        yield "data", start, end
        return
    position = start
    while position < end:
        try:
            data = min(os.lseek(source, position, os.SEEK_DATA), end)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system cannot tell: treat everything as data
                yield "data", position, end
                return
            data = end
        if data > position:
            yield "hole", position, data
        if data >= end:
            return
        position = min(os.lseek(source, data, os.SEEK_HOLE), end)
        yield "data", data, position
