"""Where an output may go, whether it fits, and how two directories change places in one step."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from xmac_cli.checkpoint.writer import sync_path
from xmac_cli.cli.errors import UsageError, XmacError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_destination(source: Path | None, destination: Path, overwrite: bool) -> None:
    """Refuse destinations that would damage the input or something that is not an earlier output.

    Args:
        source: the input directory, or None.
        destination: where the output should appear.
        overwrite: whether an existing directory may be replaced.

    Raises:
        UsageError: with the reason.
    """
    real = Path(os.path.realpath(destination))
    if source is not None:
        real_source = Path(os.path.realpath(source))
        if real == real_source:
            raise UsageError(f"output and input are the same directory, {real}", "choose another output")
        if real.is_relative_to(real_source):
            raise UsageError(f"the output {real} lies inside the input {real_source}", "choose another output")
        if real_source.is_relative_to(real):
            raise UsageError(f"the input {real_source} lies inside the output {real}", "choose another output")
    if not os.path.lexists(real):
        return
    if not real.is_dir():
        raise UsageError(f"{real} exists and is not a directory", "choose another output")
    if not any(real.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{real} exists and is not empty", "choose another output, or replace it with --overwrite")
    for precious in (Path.home(), Path.cwd()):
        if Path(os.path.realpath(precious)).is_relative_to(real):
            raise UsageError(f"{real} will not be replaced: it contains {precious}", "choose another output")


def check_free_space(directory: Path, needed_bytes: int) -> None:
    """Raise XmacError when the file system of `directory` (or of its nearest existing parent) has too little room."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise XmacError(
            f"{needed_bytes / 2**30:.2f} GiB are needed on the disk of {existing}, {free / 2**30:.2f} GiB are free",
            "free some space or choose an output on another disk",
        )


def sync_tree(root: Path) -> None:
    """Force every file and directory below `root` to disk."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync_path(Path(folder) / name)
        sync_path(Path(folder))


def exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step (Linux renameat2); False where kernel or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = (os.fsencode(first), os.fsencode(second))
    return libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0
