"""sha256 of files, at the speed of the disk: many files at once, or one file while it is being written.

hashlib releases the interpreter lock, so plain threads use all cores. Memory is one 256 KB buffer a thread.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xmac_cli.checkpoint.files import open_regular

_BUFFER_BYTES = 1 << 18


def hash_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the sha256 of a plain file as hex digits."""
    descriptor = open_regular(path)
    digest = hashlib.sha256()
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while count := file.readinto(view):
            digest.update(view[:count])
            if on_bytes is not None:
                on_bytes(count)
    return digest.hexdigest()


def hash_files(
    paths: Iterable[Path], threads: int | None = None, on_bytes: Callable[[int], None] | None = None
) -> dict[Path, str]:
    """Hash many files.

    Args:
        paths: plain files.
        threads: files hashed at the same time; None for one per core.
        on_bytes: called with the number of bytes done since the last call, from any thread.

    Returns:
        sha256 as hex digits by path, in the order of `paths`.
    """
    ordered = list(paths)
    with ThreadPoolExecutor(max_workers=threads or os.cpu_count() or 1) as pool:
        return dict(zip(ordered, pool.map(lambda path: hash_file(path, on_bytes), ordered)))


class TrailingHash:
    """Hashes a file from its beginning to wherever the writer has got, in a thread of its own.

    Args:
        path: the file, already of its final size, being filled in order.
        written: bytes that are already final. A positive number means the file is complete.
    """

    def __init__(self, path: Path, written: int = 0) -> None:
        self._descriptor = open_regular(path)
        self._digest = hashlib.sha256()
        self._written = written
        self._complete = written > 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="sha256", daemon=True)
        self._thread.start()

    def advance(self, count: int) -> None:
        """Say that `count` more bytes are final."""
        with self._changed:
            self._written += count
            self._changed.notify()

    def finish(self) -> None:
        """Say that no more bytes will come."""
        with self._changed:
            self._complete = True
            self._changed.notify()

    def abandon(self) -> None:
        """Stop without a result."""
        with self._changed:
            self._written = 0
            self._complete = True
            self._changed.notify()
        self._thread.join()

    def hexdigest(self) -> str:
        """Wait for the thread and return the sha256 as hex digits."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def _run(self) -> None:
        try:
            self._follow()
        except OSError as error:
            self._error = error
        finally:
            os.close(self._descriptor)

    def _follow(self) -> None:
        view = memoryview(bytearray(_BUFFER_BYTES))
        position = 0
        while available := self._wait_beyond(position):
            count = os.preadv(self._descriptor, [view[: min(available, _BUFFER_BYTES)]], position)
            if count == 0:
                raise OSError(f"the file ended at byte {position:,} while it was hashed")
            self._digest.update(view[:count])
            position += count

    def _wait_beyond(self, position: int) -> int:
        """Return how many bytes behind `position` are final, 0 when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._written > position or self._complete)
            return max(self._written - position, 0)
