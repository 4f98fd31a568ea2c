"""xmac.json: how a checkpoint came to be, what the last step reported, and the hash of every file beside it.

    {"schema": "xmac/1", "lineage": [step, ...], "report": {...}, "files": {name: {"bytes": n, "sha256": hex}}}

A step is {verb, version, options, seed, input {path, name, fingerprint}, output_fingerprint, seconds,
peak_memory_bytes}. The steps of the input are carried along, so a chain documents itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.directory import CONFIG_NAME, Checkpoint
from xmac_cli.checkpoint.files import contained_file, read_json_object
from xmac_cli.checkpoint.fingerprint import fast_fingerprint
from xmac_cli.checkpoint.hashing import hash_files
from xmac_cli.checkpoint.writer import ShardRecord, write_durably
from xmac_cli.cli.errors import InputError

XMAC_JSON = "xmac.json"
SCHEMA = "xmac/1"


def read_xmac_json(directory: Path) -> dict[str, Any] | None:
    """Read a directory's xmac.json.

    Args:
        directory: any directory.

    Returns:
        The content, or None when there is no such file.

    Raises:
        InputError: it is broken, or of another schema.
    """
    if not os.path.lexists(directory / XMAC_JSON):
        return None
    path = contained_file(directory, XMAC_JSON)
    content = read_json_object(path)
    if content.get("schema") != SCHEMA:
        raise InputError(f"{path}: schema {content.get('schema')!r} is not {SCHEMA!r}", "use the xmac that wrote it")
    lineage, files = content.get("lineage"), content.get("files")
    if not isinstance(lineage, list) or not all(isinstance(step, dict) for step in lineage):
        raise InputError(f"{path}: lineage must be a list of objects")
    if not isinstance(files, dict) or not all(_is_file_entry(entry) for entry in files.values()):
        raise InputError(f"{path}: files must map names to bytes and sha256")
    return content


def write_xmac_json(
    directory: Path,
    step: dict[str, Any],
    report: Mapping[str, Any],
    inherited: Sequence[dict[str, Any]],
    *,
    known: Mapping[str, ShardRecord] | None = None,
) -> None:
    """Write xmac.json as the last file of an output.

    Args:
        directory: the complete output, not yet published.
        step: this step; a missing or null output_fingerprint is filled in when the directory is a checkpoint.
        report: the report of this step.
        inherited: lineage of the input.
        known: files whose hash was computed while they were written (`StagedOutput.done`); the others are hashed now.
    """
    if step.get("output_fingerprint") is None and (directory / CONFIG_NAME).exists():
        step = {**step, "output_fingerprint": _fingerprint(directory)}
    content = {
        "schema": SCHEMA,
        "lineage": [*inherited, step],
        "report": report,
        "files": describe_files(directory, known or {}),
    }
    write_durably(directory / XMAC_JSON, (json.dumps(content, indent=2) + "\n").encode("ascii"))


def describe_files(directory: Path, known: Mapping[str, ShardRecord]) -> dict[str, dict[str, Any]]:
    """Return {relative name: {"bytes", "sha256"}} of all files but xmac.json and hidden ones, sorted by name."""
    names = [name for name in sorted(listed_files(directory)) if name != XMAC_JSON]
    sizes = {name: (directory / name).stat().st_size for name in names}
    fresh = [name for name in names if name not in known or known[name].size != sizes[name]]
    hashes = hash_files([directory / name for name in fresh])
    digests = {name: known[name].sha256 for name in names if name not in fresh}
    digests |= {path.relative_to(directory).as_posix(): digest for path, digest in hashes.items()}
    return {name: {"bytes": sizes[name], "sha256": digests[name]} for name in names}


def listed_files(directory: Path) -> Iterator[str]:
    """Yield relative names of all files below a directory, leaving out hidden files and folders."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(directory).as_posix()


def _fingerprint(directory: Path) -> str | None:
    try:
        return fast_fingerprint(Checkpoint.open(directory))
    except InputError:  # a config without weights: an attachment or a report, not a checkpoint
        return None


def _is_file_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
