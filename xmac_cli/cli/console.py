"""People read stderr, programs read stdout: everything said to a person goes through here."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xmac_cli.cli.errors import XmacError

if TYPE_CHECKING:
    from rich.console import Console

    from xmac_cli.report.schema import Table


def stderr_console() -> Console:
    """A rich console on stderr: no colour when it is not a terminal or NO_COLOR is set."""
    from rich.console import Console

    width = None if sys.stderr.isatty() else int(os.environ.get("COLUMNS", "120"))
    return Console(stderr=True, width=width, highlight=False)


def format_cell(value: object) -> str:
    """One table cell: four significant digits for floats, thousands separators for large integers, - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    """Show a report's tables."""
    from rich import box
    from rich.table import Table as RichTable

    for table in tables:
        shown = RichTable(title=table.title, caption=table.note or None, box=box.SIMPLE_HEAD, title_justify="left")
        numeric = [all(isinstance(row[i], int | float | None) for row in table.rows) for i in range(len(table.columns))]
        for name, right in zip(table.columns, numeric, strict=True):
            shown.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*(format_cell(cell).replace("[", "\\[") for cell in row))
        console.print(shown)


def print_error(error: XmacError) -> None:
    """One sentence on stderr, and the hint below it; plain text, so that it works without a terminal."""
    sys.stderr.write(f"xmac: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"      {error.hint}\n")


def print_warnings(console: Any, warnings: Sequence[str]) -> None:
    """Each warning on its own line."""
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
