"""Reports are safe HTML, plain JSON and deterministic plots."""

import json

from xmac_cli.cli.console import format_cell
from xmac_cli.report.html import write_report
from xmac_cli.report.plots import draw_figures
from xmac_cli.report.schema import Figure, Report, Table


def line(figure):
    figure.subplots().plot([0, 1, 4])


def test_cells_are_short_and_exact():
    cells = [1234567, 3.14159265, None, True, float("nan"), "text", 1e-9]
    assert [format_cell(c) for c in cells] == ["1,234,567", "3.142", "-", "yes", "nan", "text", "1e-09"]


def test_text_from_an_input_cannot_become_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    report = Report({"name": evil}, tables=[Table(evil, [evil], [[evil]], evil)], warnings=[evil])
    page = write_report(report, tmp_path, title=evil, options={"x": evil}).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


def test_the_json_holds_result_options_and_timings(tmp_path):
    write_report(Report({"a": 1}, timings={"seconds": 2}), tmp_path, title="t", options={"seed": 3})
    body = json.loads((tmp_path / "report.json").read_text())
    assert body["result"] == {"a": 1} and body["options"] == {"seed": 3} and body["timings"] == {"seconds": 2}


def test_json_readers_that_know_no_nan_can_read_every_report(tmp_path):
    report = Report({"a": [1.5, float("nan")], "b": {"c": (float("inf"), 2)}}, timings={"rate": float("-inf")})
    write_report(report, tmp_path, title="t", options={})
    body = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda word: 1 / 0)
    assert body["result"] == {"a": [1.5, None], "b": {"c": [None, 2]}} and body["timings"] == {"rate": None}


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    figure = Figure("line", "A line", line)
    (one,) = draw_figures([figure], tmp_path / "one")
    (two,) = draw_figures([figure], tmp_path / "two")
    assert one.read_bytes() == two.read_bytes() and one.stat().st_size > 1000
