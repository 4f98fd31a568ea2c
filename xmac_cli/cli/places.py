"""Whether a place can be written, asked before the work and not after hours of it.

OUTPUT itself is checked by the staging (xmac_cli.checkpoint.output); this is for what lies beside it: reports, plots,
plans, scores.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from xmac_cli.cli.errors import UsageError, XmacError


def check_writable(path: Path, flag: str, *, directory: bool) -> None:
    """Check that a file or directory can be made; makes nothing.

    Args:
        path: the place.
        flag: the option that names it, for the message.
        directory: whether a directory is wanted, or a file.

    Raises:
        UsageError: something else is there, or the place may not be written.
    """
    if os.path.lexists(path) and path.is_dir() != directory:
        is_what, wanted = ("a directory", "a file") if path.is_dir() else ("a file", "a directory")
        raise UsageError(f"{flag} {path} is {is_what}, but {wanted} would be written there")
    place = path if os.path.lexists(path) else path.absolute().parent
    while not os.path.lexists(place):
        place = place.parent
    if place != path and not place.is_dir():
        raise UsageError(f"{flag} {path} cannot be made, because {place} is not a directory")
    if not os.access(place, os.W_OK):
        raise UsageError(f"{flag} {path} cannot be written: no permission for {place}")


def as_xmac_error(error: OSError) -> XmacError:
    """What the operating system refused, as one sentence."""
    where = "".join(f" {name}" for name in (error.filename,) if name is not None)
    reason = error.strerror or " ".join(str(error).split())[:300] or type(error).__name__
    hints = {
        errno.ENOSPC: "free some space, then continue with --resume",
        errno.EDQUOT: "free some of your quota, then continue with --resume",
        errno.EFBIG: "raise the limit on the size of files, then continue with --resume",
    }
    return XmacError(f"the system refused{where}: {reason}", hints.get(error.errno or 0))
