"""Checking a directory against what it says about itself.

Checked: the safetensors format and index; sha256 of every file that xmac.json lists; that no unlisted file could change
the model; the fingerprints that attachments depend on; in a hub cache, that files match the hashes that name them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.auxiliary import attachment_folders
from xmac_cli.checkpoint.directory import CONFIG_NAME, Checkpoint
from xmac_cli.checkpoint.files import contained_file
from xmac_cli.checkpoint.fingerprint import fast_fingerprint
from xmac_cli.checkpoint.hashing import hash_files
from xmac_cli.checkpoint.lineage import XMAC_JSON, listed_files, read_xmac_json
from xmac_cli.cli.errors import InputError, VerificationError, XmacError
from xmac_cli.cli.progress import NullProgress, Progress

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Files of these kinds can change what a loaded model computes; a stray note beside them cannot.
_EFFECTIVE_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".json", ".py", ".jinja")
)


@dataclass(frozen=True)
class VerifyResult:
    """What was checked and what differs.

    Args:
        path: the directory.
        recorded: whether it had an xmac.json to be checked against.
        hashed_files: number of files whose sha256 was compared.
        hashed_bytes: their bytes.
        attachments: names of attachments that were checked.
        differences: one sentence each; empty when everything is as recorded.
        notes: one sentence each: what could not be checked, or does not matter.
    """

    path: Path
    recorded: bool
    hashed_files: int
    hashed_bytes: int
    attachments: tuple[str, ...]
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    def raise_for_differences(self) -> None:
        """Raise VerificationError, exit code 5, that lists what differs; do nothing when nothing does."""
        if not self.differences:
            return
        shown = "".join(f"\n  - {difference}" for difference in self.differences[:50])
        more = f"\n  - and {len(self.differences) - 50} more" if len(self.differences) > 50 else ""
        raise VerificationError(
            f"{self.path} is not what it says it is; {len(self.differences)} differences:{shown}{more}",
            "make it again from its input (xmac inspect shows how it was made), or copy it again",
        )


def verify_directory(path: Path, *, threads: int | None = None, progress: Progress | None = None) -> VerifyResult:
    """Re-check every hash, the format, and every attachment of a checkpoint or other output of xmac.

    Args:
        path: the directory; all listed files are read.
        threads: files hashed at the same time; None for one per core.
        progress: shown while files are hashed.

    Raises:
        InputError: not a checkpoint and no xmac.json, or a broken xmac.json.
    """
    root = Path(path)
    if not root.is_dir():
        raise InputError(f"{root} is not a directory")
    record = read_xmac_json(root)
    is_checkpoint = (root / CONFIG_NAME).exists() or any(root.glob("*.safetensors"))
    if record is None and not is_checkpoint:
        raise InputError(f"{root} is neither a checkpoint nor an output of xmac (no config.json, no xmac.json)")
    differences: list[str] = []
    notes: list[str] = []
    checkpoint = _open(root, differences) if is_checkpoint else None
    expected = _expected_hashes(root, record, differences)
    if record is None:
        notes.append("there is no xmac.json, so no hashes of its own to compare with")
    else:
        _find_unlisted(root, record["files"], differences, notes)
    hashed_bytes = _compare_hashes(root, expected, threads, progress or NullProgress(), differences)
    attachments: tuple[str, ...] = ()
    if checkpoint is not None:
        attachments = _check_attachments(checkpoint, differences)
        _check_last_step(checkpoint, record, differences)
    return VerifyResult(
        root, record is not None, len(expected), hashed_bytes, attachments, tuple(differences), tuple(notes)
    )


def _open(root: Path, differences: list[str]) -> Checkpoint | None:
    try:
        return Checkpoint.open(root)
    except XmacError as error:
        differences.append(error.message)
        return None


def _expected_hashes(root: Path, record: dict[str, Any] | None, differences: list[str]) -> dict[str, tuple[int, str]]:
    """Return {relative name: (bytes, sha256)} of the files to hash; missing ones become differences."""
    expected: dict[str, tuple[int, str]] = {}
    for name, entry in (record or {"files": {}})["files"].items():
        try:
            target = contained_file(root, name)
        except InputError as error:
            differences.append(error.message)
            continue
        if not target.is_file():
            differences.append(f"{name} is missing")
        elif target.stat().st_size != entry["bytes"]:
            differences.append(f"{name} has {target.stat().st_size:,} bytes, not {entry['bytes']:,}")
        else:
            expected[name] = (entry["bytes"], entry["sha256"])
    if record is None:
        expected |= dict(_hub_hashes(root))
    return expected


def _hub_hashes(root: Path) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield the files of a hub snapshot whose blob is named by its sha256 (large files are; small ones have git's)."""
    for path in sorted(root.rglob("*")):
        if path.is_symlink() and path.is_file():
            blob = path.resolve()
            if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
                yield path.relative_to(root).as_posix(), (blob.stat().st_size, blob.name)


def _find_unlisted(root: Path, files: dict[str, Any], differences: list[str], notes: list[str]) -> None:
    for name in listed_files(root):
        if name in files or name == XMAC_JSON:
            continue
        if Path(name).suffix in _EFFECTIVE_SUFFIXES:
            differences.append(f"{name} is not listed in {XMAC_JSON}")
        else:
            notes.append(f"{name} is not listed in {XMAC_JSON}; it has no effect on the model")


def _compare_hashes(
    root: Path,
    expected: dict[str, tuple[int, str]],
    threads: int | None,
    progress: Progress,
    differences: list[str],
) -> int:
    total = sum(size for size, _ in expected.values())
    with progress.task("hashing", total=total, unit="bytes") as task:
        found = hash_files([root / name for name in expected], threads, on_bytes=task.advance)
    for name, (_, digest) in expected.items():
        if found[root / name] != digest:
            differences.append(f"{name} has other content: sha256 {found[root / name]}, not {digest}")
    return total


def _check_attachments(checkpoint: Checkpoint, differences: list[str]) -> tuple[str, ...]:
    folders = attachment_folders(checkpoint.path, checkpoint.config)
    fingerprint = fast_fingerprint(checkpoint) if folders else ""
    for name, folder in folders.items():
        if not (checkpoint.path / folder).is_dir():
            differences.append(f"attachment {name}: its folder {folder} is missing")
        wanted = checkpoint.config["xmac"]["attachments"][name].get("depends_on")
        if wanted != fingerprint:
            differences.append(f"attachment {name} was made for {wanted}, but this checkpoint is {fingerprint}")
    return tuple(folders)


def _check_last_step(checkpoint: Checkpoint, record: dict[str, Any] | None, differences: list[str]) -> None:
    wanted = record["lineage"][-1].get("output_fingerprint") if record and record["lineage"] else None
    if wanted is not None and wanted != fast_fingerprint(checkpoint):
        differences.append(f"the last step of the lineage produced {wanted}, not {fast_fingerprint(checkpoint)}")
