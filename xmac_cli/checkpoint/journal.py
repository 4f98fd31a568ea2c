"""The journal of unfinished output: which job it belongs to and which files of it are complete.

One JSON object a line, synced after each line. A line that a power cut tore is ignored together with everything after
it; the work it stood for is done again. The first line names the job.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.writer import write_all

SCHEMA = "xmac-journal/1"


@dataclass(frozen=True)
class JobHeader:
    """First line of a journal: what is being made, and in how many independent shares (None: one process)."""

    job_key: str
    shares: int | None


class Journal:
    """An open, locked journal file.

    Args:
        path: created when missing.
        shared: several processes may hold it (they write to journals of their own, see StagedOutput).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._lock = threading.Lock()

    def lock(self, *, shared: bool, wait: bool = False) -> bool:
        """Lock against other processes; False when another holds it, or the file was removed meanwhile."""
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self._descriptor, kind)
        except BlockingIOError:
            return False
        return self._is_current()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def entries(self) -> list[dict[str, Any]]:
        """Return all intact lines."""
        return parse_lines(self._read())

    def restart(self, header: JobHeader) -> None:
        """Forget everything and begin with `header`."""
        with self._lock:
            os.ftruncate(self._descriptor, 0)
        self.append({"schema": SCHEMA, **asdict(header)})

    def append(self, entry: dict[str, Any]) -> None:
        """Add a line and wait until it is on disk; a torn line at the end is replaced."""
        line = json.dumps(entry, sort_keys=True).encode("ascii") + b"\n"
        with self._lock:
            end = intact_length(self._read())
            os.ftruncate(self._descriptor, end)
            write_all(self._descriptor, line, end)
            os.fsync(self._descriptor)

    def _read(self) -> bytes:
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, 0)

    def _is_current(self) -> bool:
        try:
            there = self.path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        here = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def parse_lines(raw: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of the intact lines at the beginning of `raw`."""
    return [json.loads(line) for line in raw[: intact_length(raw)].splitlines()]


def intact_length(raw: bytes) -> int:
    """Return how many bytes at the beginning of `raw` are complete lines that hold JSON objects."""
    length = 0
    for line in raw.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            if not isinstance(json.loads(line), dict):
                break
        except ValueError:
            break
        length += len(line)
    return length


def job_of(entries: list[dict[str, Any]]) -> JobHeader | None:
    """Return the job that a journal belongs to, or None when it is not a journal of ours."""
    if not entries or entries[0].get("schema") != SCHEMA:
        return None
    shares = entries[0].get("shares")
    return JobHeader(str(entries[0].get("job_key")), shares if isinstance(shares, int) else None)
