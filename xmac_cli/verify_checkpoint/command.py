"""`xmac verify`: report; the checks are in checkpoint/verification.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.report.schema import Report, Table


@dataclass(frozen=True)
class VerifyCheckpoint(Verb):
    """Re-check a directory against its own record: format, every hash, stray files, attachments.

    Leaves with exit code 5 and the list of differences when something is not as recorded. A checkpoint without
    xmac.json is checked for its format only; a snapshot in a hub cache also against the hashes that name its files.
    """

    name: ClassVar[str] = "verify"
    reads: ClassVar[str | None] = "directory"
    writes: ClassVar[str | None] = None

    def execute(self, job: Job) -> Report:
        from xmac_cli.checkpoint.verification import verify_directory

        result = verify_directory(job.checkpoint, threads=job.threads, progress=job.progress)
        result.raise_for_differences()
        rows: list[list[object]] = [
            ["safetensors format and index", "as the format demands"],
            ["files whose sha256 was compared", result.hashed_files],
            ["bytes read", f"{result.hashed_bytes:,}"],
            ["attachments checked", ", ".join(result.attachments) or "none"],
        ]
        body = {
            "recorded": result.recorded,
            "hashed_files": result.hashed_files,
            "hashed_bytes": result.hashed_bytes,
            "attachments": list(result.attachments),
            "notes": list(result.notes),
        }
        return Report(body, tables=[Table(f"{result.path.name}: as recorded", ["", ""], rows)], warnings=result.notes)

    def plan(self, source: Path | None) -> Report:
        from xmac_cli.checkpoint.lineage import read_xmac_json

        if source is None:
            raise UsageError("INPUT is missing", "give a directory")
        record = read_xmac_json(source)
        files = record["files"] if record else {}
        size = sum(entry["bytes"] for entry in files.values())
        table = Table("Would read", ["files", "bytes"], [[len(files), f"{size:,}"]])
        return Report({"files": len(files), "bytes": size}, tables=[table])
