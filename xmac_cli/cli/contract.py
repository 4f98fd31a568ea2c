"""The contract of every verb, in one place: check first, work in a staged directory, record the lineage, then publish.

Order of a run: INPUT is resolved and its headers are read; OUTPUT and free names are checked; the verb works in
`OUTPUT.partial`; xmac.json is written; the directory is renamed. See docs/contract.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmac_cli import __version__
from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.inputs import resolve_input
from xmac_cli.cli.options import as_plain, option_fields
from xmac_cli.cli.places import check_writable
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.cli.settings import RunSettings
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.models.processes import process_rank
from xmac_cli.report.schema import Report

if TYPE_CHECKING:
    from xmac_cli.checkpoint.output import StagedOutput

METRICS = "metrics.jsonl"


def run_verb(verb: Verb, source: Path | None, output: Path | None, settings: RunSettings, progress: Progress) -> Report:
    """Run a verb from checks to published OUTPUT.

    Args:
        verb: options, validated by their own class.
        source: INPUT as the user named it, or None.
        output: OUTPUT, or None.
        settings: the common flags.
        progress: where the verb tells how far it is.

    Returns:
        The verb's report, with `output` set to the path that stdout announces.

    Raises:
        XmacError: in every foreseen case, with nothing left at OUTPUT.
    """
    started = time.monotonic()
    _limit_threads(settings.threads)
    opened = _open_source(verb, source)
    path = opened.path
    _check_report_places(settings)
    kind = verb.output_kind()
    if process_rank()[0] > 0:
        verb.assist(Job(path, None, NullProgress(), settings))
        return Report({})
    if kind is None:
        if output is not None:
            raise UsageError(f"{verb.name} with these options writes no OUTPUT, but {output} was given")
        report = verb.execute(Job(path, None, progress, settings))
        report = replace(report, output=report.output or path, timings=_timings(report, started))
    else:
        output = output or verb.default_output()
        if output is None:
            raise UsageError("OUTPUT is missing", "give a second path or -o OUTPUT")
        if "\n" in str(output):
            raise UsageError("the name of OUTPUT holds a line break, so stdout could not name it in one line")
        report = _run_staged(verb, opened, output, settings, progress, started)
    _write_report_files(verb, report, settings)
    return report


def dry_run(verb: Verb, source: Path | None) -> Report:
    """What the verb would do, from headers only; nothing is written."""
    if process_rank()[0] > 0:
        return Report({})
    return verb.plan(_open_source(verb, source).path)


@dataclass(frozen=True)
class _Source:
    """INPUT after its headers were read.

    Args:
        path: existing path, or None for a verb that reads nothing.
        fingerprint: what lineage records; equal for copies of a checkpoint.
        identity: what --resume compares; also sees that files were replaced by others of the same shapes.
    """

    path: Path | None = None
    fingerprint: str | None = None
    identity: str = ""


def _open_source(verb: Verb, source: Path | None) -> _Source:
    if verb.reads is None:
        return _Source()
    if source is None:
        raise UsageError("INPUT is missing", "give a path, or - to read one from stdin")
    path = resolve_input(source, verb.reads)
    if verb.reads != "checkpoint":
        status = path.stat()
        return _Source(path, None, f"{path.resolve()} {status.st_size} {status.st_mtime_ns}")
    from xmac_cli.checkpoint.directory import Checkpoint
    from xmac_cli.checkpoint.fingerprint import fast_fingerprint, local_identity

    checkpoint = Checkpoint.open(path)
    return _Source(path, fast_fingerprint(checkpoint), local_identity(checkpoint))


def _run_staged(
    verb: Verb, source: _Source, output: Path, settings: RunSettings, progress: Progress, started: float
) -> Report:
    from xmac_cli.checkpoint.output import StagedOutput, check_destination

    key = job_key(verb, settings, source.identity)
    if settings.resume and _is_result_of(output, key):
        return _published(output, started)
    check_destination(source.path, output, settings.overwrite)
    staged = StagedOutput(
        output, overwrite=settings.overwrite, resume=settings.resume, job_key=key, shares=verb.shares()
    )
    with staged:
        if staged.finished:
            return _published(output, started)
        staged.scratch.mkdir(parents=True, exist_ok=True)
        progress.metrics_to(staged.path / METRICS)
        report = verb.execute(Job(source.path, staged, progress, settings, staged.scratch))
        report = replace(report, timings=_timings(report, started))
        if not staged.complete:
            progress.note("this share is done; the process that finishes the last share publishes OUTPUT")
            return report
        _record(verb, source, staged, settings, key, report)
        staged.commit()
    return replace(report, output=output)


def _is_result_of(output: Path, key: str) -> bool:
    """Whether a killed run had already published OUTPUT: then there is nothing left to resume."""
    from xmac_cli.checkpoint.lineage import read_xmac_json

    if not output.is_dir():
        return False
    steps = (read_xmac_json(output) or {}).get("lineage") or [{}]
    return steps[-1].get("job") == key


def _published(output: Path, started: float) -> Report:
    """The report of an output that an interrupted run had already published."""
    from xmac_cli.checkpoint.lineage import read_xmac_json

    stored = (read_xmac_json(output) or {}).get("report", {})
    report = Report(stored.get("result", {}), warnings=stored.get("warnings", ()), output=output)
    return replace(report, timings=_timings(report, started))


def job_key(verb: Verb, settings: RunSettings, source: str) -> str:
    """Identity of the work: what must be equal for --resume to continue it."""
    matters = {field.name for field in option_fields(type(verb)) if field.option.identity}
    options = {name: value for name, value in as_plain(verb).items() if name in matters}
    contents = [_content(getattr(verb, name)) for name in sorted(matters)]
    identity = [verb.name, __version__, options, contents, settings.seed, settings.dtype, source]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _record(verb: Verb, source: _Source, staged: StagedOutput, settings: RunSettings, key: str, report: Report) -> None:
    from xmac_cli.checkpoint.lineage import read_xmac_json, write_xmac_json

    path = source.path
    inherited = (read_xmac_json(path) or {}).get("lineage", []) if path is not None and path.is_dir() else []
    origin = None
    if path is not None:
        where = path.absolute()
        origin = {"path": str(where), "name": where.name, "fingerprint": source.fingerprint}
    step: dict[str, Any] = {
        "verb": verb.name,
        "version": __version__,
        "options": as_plain(verb),
        "settings": {"dtype": settings.dtype, "device": settings.device},
        "seed": settings.seed,
        "input": origin,
        "output_fingerprint": None,
        "job": key,
        "seconds": report.timings["seconds"],
        "peak_memory_bytes": report.timings["peak_memory_bytes"],
    }
    write_xmac_json(staged.path, step, report.as_json(), inherited, known=staged.done)


def _content(value: Any) -> list[str]:
    """Hashes of the files that an option names: an edited plan or another calibration text is other work."""
    from xmac_cli.checkpoint.hashing import hash_files

    paths = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Path)]
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    hashes = hash_files([file for file in files if file.is_file()])
    return [hashes[file] for file in files if file in hashes]


def _timings(report: Report, started: float) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scale = 1 if sys.platform == "darwin" else 1024
    return {
        **report.timings,
        "seconds": round(time.monotonic() - started, 3),
        "peak_memory_bytes": peak * scale,
    }


def _limit_threads(threads: int | None) -> None:
    """Apply --threads before torch is imported, or to a torch that is already there."""
    if threads is None:
        return
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[variable] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _check_report_places(settings: RunSettings) -> None:
    for path, flag in ((settings.report, "--report"), (settings.plots, "--plots")):
        if path is not None:
            check_writable(path, flag, directory=True)


def _write_report_files(verb: Verb, report: Report, settings: RunSettings) -> None:
    if settings.report is None and settings.plots is None:
        return
    from xmac_cli.report.html import write_report
    from xmac_cli.report.plots import draw_figures

    if settings.plots is not None:
        draw_figures(report.figures, settings.plots)
    if settings.report is not None:
        write_report(report, settings.report, title=f"xmac {verb.name}", options=as_plain(verb))
