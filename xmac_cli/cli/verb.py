"""What a verb is: a frozen dataclass of options plus `execute`, and optionally `plan` for --dry-run.

    @dataclass(frozen=True)
    class PruneMoe(Verb):
        \"\"\"One help line.\"\"\"

        name: ClassVar[str] = "prune-moe"
        reads: ClassVar[str | None] = "checkpoint"
        writes: ClassVar[str | None] = "checkpoint"
        ratio: Annotated[float | None, Option("share of routed experts to remove", ge=0, lt=1)] = None

        def execute(self, job: Job) -> Report: ...

The same class serves the command line and Python: ``PruneMoe(ratio=0.25).run("in", "out", seed=1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.options import check_values
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.cli.settings import RunSettings

if TYPE_CHECKING:
    from xmac_cli.checkpoint.output import StagedOutput
    from xmac_cli.report.schema import Report


@dataclass(frozen=True)
class Job:
    """One run of a verb, as the method sees it.

    Args:
        source: INPUT as an existing path, or None for a verb that reads nothing.
        output: the staged OUTPUT, or None for a verb that writes nothing. It becomes visible when `execute` returns.
        progress: where to tell how far the work is.
        settings: the flags common to all verbs.
        scratch: a directory for intermediate state that survives an interruption (--resume) and is removed when the
            run succeeds; None where there is no OUTPUT.
    """

    source: Path | None
    output: StagedOutput | None
    progress: Progress
    settings: RunSettings
    scratch: Path | None = None

    @property
    def checkpoint(self) -> Path:
        """INPUT of a verb that reads one.

        Raises:
            UsageError: INPUT is missing.
        """
        if self.source is None:
            raise UsageError("INPUT is missing", "give a checkpoint directory, or - to read its path from stdin")
        return self.source

    @property
    def staged(self) -> StagedOutput:
        """OUTPUT of a verb that writes one.

        Raises:
            UsageError: OUTPUT is missing.
        """
        if self.output is None:
            raise UsageError("OUTPUT is missing", "give a second path or -o OUTPUT")
        return self.output

    @property
    def device(self) -> str:
        return self.settings.device

    @property
    def dtype(self) -> str:
        return self.settings.dtype

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def threads(self) -> int | None:
        return self.settings.threads

    @property
    def link(self) -> bool:
        return self.settings.link

    @property
    def resume(self) -> bool:
        return self.settings.resume


@dataclass(frozen=True)
class Verb:
    """Base of all verbs.

    Class attributes:
        name: the word on the command line.
        reads: what INPUT is: "checkpoint" (opened and checked first), "directory" (only looked up), "file", or None.
        writes: what OUTPUT is: "checkpoint", "directory", or None (then stdout repeats INPUT, so chains go on).
    """

    name: ClassVar[str] = ""
    reads: ClassVar[str | None] = "checkpoint"
    writes: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_values(self)
        self.check()

    def check(self) -> None:
        """Rules between options.

        Raises:
            UsageError: options that do not go together.
        """

    def output_kind(self) -> str | None:
        """What these options write; `writes` unless an option changes it."""
        return self.writes

    def default_output(self) -> Path | None:
        """OUTPUT when the command line names none."""
        return None

    def shares(self) -> tuple[int, int] | None:
        """(i, n) when this process does share i of n of the work, counted from 1."""
        return None

    def execute(self, job: Job) -> Report:
        """Do the work. Never prints."""
        raise NotImplementedError

    def assist(self, job: Job) -> None:
        """What the second and further processes of one launch do; by default the first works alone."""

    def plan(self, source: Path | None) -> Report:
        """What a run would do, and what it would cost, from headers only (--dry-run)."""
        raise UsageError(f"{self.name} has no --dry-run")

    def run(
        self,
        source: str | Path | None = None,
        output: str | Path | None = None,
        *,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Report:
        """Run the verb under its whole contract: staged output, lineage, report.

        Args:
            source: INPUT path or hub id.
            output: OUTPUT path.
            progress: None is silent.
            settings: fields of RunSettings, such as seed=1 or overwrite=True.

        Raises:
            XmacError: with the documented exit code as `.exit_code`.
        """
        from xmac_cli.cli.contract import run_verb

        where = None if source is None else Path(source)
        target = None if output is None else Path(output)
        return run_verb(self, where, target, RunSettings(**settings), progress or NullProgress())
