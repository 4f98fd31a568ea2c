"""The report every verb returns.

`result` holds what the method found and must be the same for the same input, options and seed; whatever depends on the
clock or the machine belongs in `timings`. Tables and figures are views of the result for people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table for people: shown on stderr and in the HTML page.

    Args:
        title: one line.
        columns: column heads.
        rows: cells; floats are shown with four significant digits, None as a dash.
        note: a sentence below the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot: `draw(axes_figure)` gets a matplotlib figure and draws on it.

    Args:
        name: file stem, unique in the report.
        title: caption; one sentence that says what to see.
        draw: called with a `matplotlib.figure.Figure`.
        size: width and height in inches.
    """

    name: str
    title: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (7.0, 4.0)


@dataclass(frozen=True)
class Report:
    """What a verb leaves behind.

    Args:
        result: JSON-able, deterministic.
        tables: for people.
        figures: for people; drawn only when asked for.
        warnings: one sentence each.
        timings: JSON-able, seconds and rates.
        output: the finished output path; set by the framework.
    """

    result: Mapping[str, Any]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = ()
    timings: Mapping[str, Any] = field(default_factory=dict)
    output: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """The JSON form: result, warnings and timings (tables and figures are views of the result)."""
        body = {"result": dict(self.result), "warnings": list(self.warnings), "timings": dict(self.timings)}
        return {key: strict(value) for key, value in body.items()}


def strict(value: Any) -> Any:
    """The same value with null for every float that JSON has no word for (NaN and the infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
