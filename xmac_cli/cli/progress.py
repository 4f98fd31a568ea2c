"""How long work tells about itself: progress bars for people, a metrics file for machines.

Methods take a `Progress` and never print. `NullProgress` is the default, so Python callers see nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console


class Task(Protocol):
    """One bar."""

    def advance(self, amount: float = 1) -> None: ...


class Progress(Protocol):
    """What a method may say while it works."""

    def task(self, description: str, total: float | None, unit: str = "") -> AbstractContextManager[Task]:
        """A bar with rate and ETA; `total` None means unknown."""
        ...

    def metric(self, values: Mapping[str, Any]) -> None:
        """Append one line to the metrics JSONL."""
        ...

    def metrics_to(self, path: Path) -> None:
        """From now on append metrics to this file."""
        ...

    def note(self, text: str) -> None:
        """One line for the person who watches."""
        ...


class _NullTask:
    def advance(self, amount: float = 1) -> None:
        return


class _Metrics:
    """Appends metrics to a JSONL file, once a verb has said where."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._start = time.monotonic()

    def metrics_to(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def metric(self, values: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        line = {"seconds": round(time.monotonic() - self._start, 3), **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class NullProgress(_Metrics):
    """Says nothing; metrics still go to the file of the run, if there is one."""

    @contextmanager
    def task(self, description: str, total: float | None, unit: str = "") -> Iterator[Task]:
        yield _NullTask()

    def note(self, text: str) -> None:
        return


class _Bar:
    def __init__(self, bars: Any, identifier: Any) -> None:
        self._bars = bars
        self._identifier = identifier

    def advance(self, amount: float = 1) -> None:
        self._bars.advance(self._identifier, amount)


class ConsoleProgress(_Metrics):
    """Bars on the console when it is a terminal, notes otherwise, and metrics into a file.

    Args:
        console: a rich console on stderr.
        quiet: say nothing on the console.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        super().__init__()
        self._console = console
        self._quiet = quiet

    @contextmanager
    def task(self, description: str, total: float | None, unit: str = "") -> Iterator[Task]:
        if self._quiet or not self._console.is_terminal:
            yield _NullTask()
            return
        from rich import progress as rich_progress

        columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.TaskProgressColumn(show_speed=True),
            rich_progress.TextColumn(unit),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TimeRemainingColumn(),
        )
        with rich_progress.Progress(*columns, console=self._console, transient=True) as bars:
            yield _Bar(bars, bars.add_task(description, total=total))

    def note(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, highlight=False, markup=False, style="dim")
