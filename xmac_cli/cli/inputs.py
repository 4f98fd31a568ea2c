"""INPUT on the command line: a path, a hub id, or - for one path on stdin."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from xmac_cli.cli.errors import InputError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def read_input_argument(text: str) -> str:
    """Replace - by the one line that stdin holds.

    Raises:
        UsageError: stdin is empty or holds more than one line.
    """
    if text != "-":
        return text
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("INPUT is - but nothing is piped in", "pipe the output of another verb, or name a path")
    lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not lines:
        raise UsageError("the verb before this one handed over no path", "look at its error above")
    if len(lines) > 1:
        raise UsageError(f"stdin holds {len(lines)} lines, one path was expected")
    return lines[0].strip()


def resolve_input(path: Path, kind: str) -> Path:
    """Turn INPUT into an existing path; a hub id is looked up in the local cache, then online.

    Args:
        path: what the user named.
        kind: "checkpoint" or "directory" (both are directories), or "file".

    Raises:
        UsageError: it does not exist.
        InputError: the hub could not provide it.
    """
    if kind == "file":
        if not path.is_file():
            raise UsageError(f"{path} is not a file")
        return path
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{path} is a file, a checkpoint directory was expected")
    if not _HUB_ID.fullmatch(str(path)):
        raise UsageError(f"{path} does not exist")
    return _from_hub(str(path))


def _from_hub(identifier: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise UsageError(f"{identifier} does not exist here, and huggingface_hub is not installed") from error
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*", "README.md"]
    try:
        return Path(snapshot_download(identifier, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{identifier} is no directory here and the hub did not provide it: {reason}",
            "check the name, your network and your token, or download it first",
        ) from error
