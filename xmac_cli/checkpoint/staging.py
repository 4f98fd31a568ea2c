"""Output that appears only when it is complete.

Work goes to a sibling directory NAME.partial:

    NAME.partial/journal.jsonl             the job's key and the files that are complete; locked while a process works
    NAME.partial/journal-I-of-N.jsonl      the same for one share of a split job (`--shards I/N`)
    NAME.partial/tree/                     becomes NAME with one rename
    NAME.partial/scratch/                  a verb's own intermediate results; survives --resume, never published

A killed run leaves NAME.partial, which `--resume` continues; NAME itself is either absent, or the old complete one, or
the new complete one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from xmac_cli.checkpoint.destination import check_destination, exchange, sync_tree
from xmac_cli.checkpoint.journal import JobHeader, Journal, job_of, parse_lines
from xmac_cli.checkpoint.writer import ShardRecord, sync_path
from xmac_cli.cli.errors import ResumeMismatchError, UsageError, XmacError

_JOURNAL = "journal.jsonl"
_REPLACED = "replaced"
_DISK_TROUBLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG))
_START_SECONDS = 20.0


class StagedOutput:
    """A context manager around the making of one output directory.

    Args:
        destination: the directory to make; parents are created, symbolic links are resolved first.
        overwrite: replace an existing directory, at the moment of `commit`.
        resume: continue what an earlier run with the same `job_key` left behind.
        job_key: identifies input and options; work of another key is never continued.
        shares: (i, n) when this process makes share i of n, counted from 1; the processes may run at the same time and
            join each other's partial directory without `resume`.

    Attributes:
        path: where files of the output go.
        scratch: where intermediate results go; kept for `resume`.
        done: files that are complete, by name.
        finished: an earlier run had completed the output and was killed while cleaning up; there is nothing to do.
    """

    def __init__(
        self,
        destination: Path,
        *,
        overwrite: bool,
        resume: bool,
        job_key: str,
        shares: tuple[int, int] | None = None,
    ) -> None:
        if shares is not None and not 1 <= shares[0] <= shares[1]:
            raise UsageError(f"share {shares[0]}/{shares[1]} does not exist", "count from 1/N to N/N")
        self.destination = Path(os.path.realpath(destination))
        self.partial = self.destination.with_name(self.destination.name + ".partial")
        self.path = self.partial / "tree"
        self.scratch = self.partial / "scratch"
        self.done: dict[str, ShardRecord] = {}
        self.finished = False
        self.shares = shares
        self._overwrite = overwrite
        self._resume = resume
        self._job = JobHeader(job_key, shares[1] if shares else None)
        self._open_journals: list[Journal] = []
        self._plans: dict[str, str] = {}
        self._may_commit = shares is None

    def __enter__(self) -> StagedOutput:
        try:
            self._start()
        except OSError as error:
            self._release()
            raise UsageError(f"cannot write {self.partial}: {error.strerror}", "choose another output") from error
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shares is None and not self.finished and _is_bare(self.path) and _is_bare(self.scratch):
            shutil.rmtree(self.partial, ignore_errors=True)  # nothing was made that would be worth resuming
        self._release()
        if isinstance(error, OSError) and error.errno in _DISK_TROUBLE:
            raise XmacError(
                f"writing {self.destination} failed: {error.strerror}",
                "the finished part is kept; free some space and run the same command with --resume",
            ) from error

    def record(self, record: ShardRecord, plan_digest: str = "") -> None:
        """Note that a file of the output is complete and on disk."""
        entry = {"file": record.file_name, "bytes": record.size, "sha256": record.sha256, "plan": plan_digest}
        self._open_journals[-1].append(entry)
        self.done[record.file_name] = record
        self._plans[record.file_name] = plan_digest

    def is_done(self, file_name: str, plan_digest: str) -> bool:
        """Tell whether a file is complete and was made from the same plan."""
        return file_name in self.done and self._plans[file_name] == plan_digest

    def claim_completion(self, names: set[str]) -> bool:
        """Find out whether this process is the one that completes the output.

        Args:
            names: all files that the shares make together.

        Returns:
            True when all of them are complete and every share has come this far; the last one gets it, and others
            wait until it has left the context. Always True for a job that is not split: its own loop has just
            completed them.
        """
        if self.shares is None or self._may_commit:
            return True
        try:
            gate = Journal(self.partial / "commit.lock")
        except FileNotFoundError:  # another share has published and removed the partial directory
            return False
        if not gate.lock(shared=False, wait=True):  # the same, while this one waited
            gate.close()
            return False
        self._open_journals.insert(0, gate)
        self._open_journals[-1].append({"share": self.shares[0]})
        self._load_done()
        reported = {entry["share"] for entry in self._entries() if "share" in entry}
        self._may_commit = names <= self.done.keys() and len(reported) == self.shares[1]
        if self._may_commit:
            self._remove_temporaries()
        return self._may_commit

    @property
    def complete(self) -> bool:
        """Whether this process may publish: always for a job that is not split, else see `claim_completion`."""
        return self.finished or self._may_commit

    def commit(self) -> bool:
        """Publish: sync everything, then make the tree appear as the destination with one rename.

        Returns:
            False when other shares of a split job are still missing; the last one publishes.

        Raises:
            UsageError: the destination has appeared meanwhile and may not be replaced.
        """
        if self.finished or not self._may_commit:
            return self.finished
        check_destination(None, self.destination, self._overwrite)
        sync_tree(self.path)
        self._open_journals[-1].append({"commit": self.path.stat().st_ino})
        self._publish()
        self.finished = True
        return True

    def _publish(self) -> None:
        if not self._overwrite or not self.destination.is_dir():
            self.path.rename(self.destination)  # fails when the destination is not empty, even if it just became so
        elif not exchange(self.path, self.destination):
            replaced = self.partial / _REPLACED
            self.destination.rename(replaced)
            self.path.rename(self.destination)
        sync_path(self.destination.parent)
        self._remove_partial()

    def _start(self) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        if self._was_committed():
            self.finished = True
            self._remove_partial()
            return
        if self.shares is None:
            journal = self._lock_alone()
            self._adopt_or_wipe(journal)
        else:
            self._join(*self.shares)
        self.path.mkdir(exist_ok=True)
        self.scratch.mkdir(exist_ok=True)
        if self.shares is None:
            self._remove_temporaries()
        self._load_done()

    def _lock_alone(self) -> Journal:
        if not (self.partial / _REPLACED).exists():
            check_destination(None, self.destination, self._overwrite)
        self._make_partial()
        journal = Journal(self.partial / _JOURNAL)
        self._open_journals.append(journal)
        if not journal.lock(shared=False):
            raise UsageError(f"another process is writing {self.partial}", "wait for it, or choose another output")
        self._put_back_replaced()
        check_destination(None, self.destination, self._overwrite)
        return journal

    def _adopt_or_wipe(self, journal: Journal) -> None:
        job = job_of(journal.entries())
        if job is not None and self._resume:
            self._check_job(job)
            return
        if job is not None:
            self._clear_partial()
        journal.restart(self._job)

    def _join(self, share: int, shares: int) -> None:
        """Enter the partial directory together with the other shares; whoever comes first begins the journal."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            check_destination(None, self.destination, self._overwrite)
            self._make_partial()
            journal = Journal(self.partial / _JOURNAL)
            if journal.lock(shared=False) and job_of(journal.entries()) is None:
                journal.restart(self._job)
            if journal.lock(shared=True) and (job := job_of(journal.entries())) is not None:
                break
            journal.close()
            if time.monotonic() > deadline:
                raise UsageError(f"another process is writing {self.partial}", "wait for it, or choose another output")
            time.sleep(0.05)
        self._open_journals.append(journal)
        self._check_job(job)
        own = Journal(self.partial / f"journal-{share}-of-{shares}.jsonl")
        self._open_journals.append(own)
        if not own.lock(shared=False):
            raise UsageError(f"another process makes share {share}/{shares} of {self.destination}")
        if job_of(own.entries()) is None:
            own.restart(self._job)

    def _make_partial(self) -> None:
        try:
            self.partial.mkdir()
        except FileExistsError as error:
            if not self.partial.is_dir() or self.partial.is_symlink():
                raise UsageError(f"{self.partial} is in the way", "move it, or choose another output") from error
            if any(self.partial.iterdir()) and not self._is_ours():
                raise UsageError(
                    f"{self.partial} exists and holds no journal of xmac, so it is not touched",
                    "move it, or choose another output",
                ) from error

    def _is_ours(self) -> bool:
        """Tell whether the partial directory has a journal of ours, or nothing but the beginning of its first line."""
        journal = self.partial / _JOURNAL
        if not journal.is_file() or journal.is_symlink():
            return False
        raw = journal.read_bytes()
        if job_of(parse_lines(raw)) is not None:
            return True
        return b"\n" not in raw and [entry.name for entry in self.partial.iterdir()] == [_JOURNAL]

    def _check_job(self, job: JobHeader) -> None:
        if job.job_key != self._job.job_key:
            raise ResumeMismatchError(
                f"{self.partial} belongs to other inputs or options",
                "repeat the interrupted command, or start over without --resume (shares: remove the directory)",
            )
        if self.shares is not None and job.shares != self._job.shares:
            raise ResumeMismatchError(f"{self.partial} is split into {job.shares or 1} shares, not {self.shares[1]}")

    def _load_done(self) -> None:
        for entry in self._entries():
            if "file" not in entry:
                continue
            record = ShardRecord(entry["file"], entry["bytes"], entry["sha256"])
            target = self.path / record.file_name
            if target.is_file() and target.stat().st_size == record.size:
                self.done[record.file_name] = record
                self._plans[record.file_name] = entry["plan"]

    def _entries(self) -> list[dict[str, Any]]:
        """Return the lines of all journals, the common one first."""
        paths = [self.partial / _JOURNAL, *sorted(self.partial.glob("journal-*.jsonl"))]
        return [entry for path in paths if path.is_file() for entry in parse_lines(path.read_bytes())]

    def _was_committed(self) -> bool:
        """Tell whether a run with our key was killed between publishing and removing the partial directory."""
        journal = self.partial / _JOURNAL
        if not self._resume or not journal.is_file() or not self.destination.is_dir():
            return False
        entries = self._entries()
        job = job_of(entries)
        inodes = {entry["commit"] for entry in entries if "commit" in entry}
        return job is not None and job.job_key == self._job.job_key and self.destination.stat().st_ino in inodes

    def _put_back_replaced(self) -> None:
        """Undo half of a replacement that was interrupted where directories cannot be exchanged in one step."""
        replaced = self.partial / _REPLACED
        if replaced.is_dir() and not self.destination.exists():
            replaced.rename(self.destination)

    def _remove_temporaries(self) -> None:
        """Remove half-written files of a killed run; must only be called when no other process writes."""
        for leftover in self.path.glob("*.tmp"):
            leftover.unlink()

    def _clear_partial(self) -> None:
        for entry in self.partial.iterdir():
            if entry.name != _JOURNAL:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _remove_partial(self) -> None:
        """Remove the partial directory, the journal last: whoever is killed before that can be resumed."""
        self._clear_partial()
        (self.partial / _JOURNAL).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another share may just be looking into it
            self.partial.rmdir()

    def _release(self) -> None:
        for journal in self._open_journals:
            journal.close()
        self._open_journals.clear()


def _is_bare(directory: Path) -> bool:
    return not any(path.is_file() and path.stat().st_size for path in directory.rglob("*"))
