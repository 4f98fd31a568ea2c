"""One self-contained HTML page and one JSON file per report."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmac_cli import __version__
from xmac_cli.cli.console import format_cell
from xmac_cli.cli.errors import MissingExtraError
from xmac_cli.report.plots import draw_figures
from xmac_cli.report.schema import Report, Table


def write_report(report: Report, directory: Path, *, title: str, options: Mapping[str, Any]) -> Path:
    """Write report.html, report.json and plots/*.png.

    Args:
        report: what a verb returned.
        directory: created if needed; files of an earlier report are replaced.
        title: heading of the page.
        options: the effective options, shown and stored.

    Returns:
        The path of the page. Without matplotlib the page has no plots and says how to get them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    body = {"title": title, "version": __version__, "options": dict(options), **report.as_json()}
    (directory / "report.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    missing = ""
    images: list[tuple[str, str]] = []
    try:
        paths = draw_figures(report.figures, directory / "plots") if report.figures else []
        images = [(f.title, _as_data(path)) for f, path in zip(report.figures, paths, strict=True)]
    except MissingExtraError as error:
        missing = f"{error.message}: {error.hint}"
    page = _render(report, title, options, images, missing)
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _as_data(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _cells(table: Table) -> list[list[tuple[str, bool]]]:
    return [[(format_cell(c), isinstance(c, int | float)) for c in row] for row in table.rows]


def _render(report: Report, title: str, options: Mapping[str, Any], images: list[tuple[str, str]], missing: str) -> str:
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("xmac_cli.report"), autoescape=True, trim_blocks=True)
    return environment.get_template("report.html").render(
        title=title,
        version=__version__,
        tables=[(table, _cells(table)) for table in report.tables],
        images=images,
        missing=missing,
        warnings=report.warnings,
        options={key: value for key, value in options.items() if value is not None},
        timings=report.timings,
        result=json.dumps(dict(report.result), indent=2),
    )
