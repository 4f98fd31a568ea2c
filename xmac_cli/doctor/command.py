"""`xmac doctor`: report; the checks are in checks.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from xmac_cli.cli.verb import Job, Verb
from xmac_cli.report.schema import Report, Table

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Doctor(Verb):
    """Versions, devices and extras; what is missing, and the command that gets it.

    It never fails because something is missing.
    """

    name: ClassVar[str] = "doctor"
    reads: ClassVar[str | None] = None
    writes: ClassVar[str | None] = None

    def execute(self, job: Job) -> Report:
        from xmac_cli.doctor.checks import examine

        found = examine()
        tables = [
            Table(heading, ["", "", "to get it"], [[p.name, p.state, p.command] for p in parts])
            for heading, parts in found.items()
        ]
        commands = list(dict.fromkeys(part.command for parts in found.values() for part in parts if part.command))
        result = {
            **{heading: [asdict(part) for part in parts] for heading, parts in found.items()},
            "commands": commands,
        }
        return Report(result=result, tables=tables)

    def plan(self, source: Path | None) -> Report:
        return Report(result={"reads": "package metadata and devices; nothing is written"})
