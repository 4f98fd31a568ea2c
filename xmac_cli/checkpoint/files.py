"""Opening files of an untrusted directory: plain files only, inside the directory only, JSON without surprises.

A checkpoint comes from somebody else. A named pipe must not make us wait, a symbolic link must not lead us to another
user's file, and JSON with repeated keys means different things to different readers, so it is refused.
The one accepted kind of outside link is the Hugging Face hub cache, `models--org--name/snapshots/REVISION/file` ->
`../../blobs/HASH`.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from xmac_cli.cli.errors import InputError

MAX_JSON_BYTES = 100_000_000


def open_regular(path: Path) -> int:
    """Open a plain file for reading without ever blocking on a pipe or a device.

    Args:
        path: file to open; symbolic links are followed (see `contained_file` for where they may lead).

    Returns:
        A file descriptor; the caller closes it.

    Raises:
        InputError: the file is missing, unreadable, or not a plain file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"cannot open {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL byte inside the name
        raise InputError(f"not a usable file name: {str(path)!r}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a plain file")
    return descriptor


def pread_exactly(descriptor: int, length: int, offset: int, path: Path) -> bytes:
    """Read `length` bytes at `offset`; a file that ends early is an InputError that names `path`."""
    parts = []
    while length:
        part = os.pread(descriptor, min(length, 1 << 24), offset)
        if not part:
            raise InputError(f"{path} ends at byte {offset}, {length} bytes too early")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def contained_file(root: Path, name: str) -> Path:
    """Resolve a file name found in an untrusted place (index, manifest) to a file inside `root`.

    Args:
        root: the checkpoint directory.
        name: relative path with forward slashes.

    Returns:
        `root / name`, not resolved, so that the name stays readable; where it leads has been checked.

    Raises:
        InputError: the name is absolute, climbs out of `root`, or is a link that leads outside.
    """
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{root}: {name!r} is not a file name inside the directory", "remove this entry")
    path = root.joinpath(*parts)
    check_containment(root, path)
    return path


def check_containment(root: Path, path: Path) -> None:
    """Raise InputError when `path` leads outside `root` and not into the blob store of its hub cache."""
    real_root = Path(os.path.realpath(root))
    real = Path(os.path.realpath(path))
    if real.is_relative_to(real_root):
        return
    blobs = hub_blob_store(real_root)
    if blobs is not None and real.parent == blobs:
        return
    raise InputError(
        f"{path} is a link that leads outside its directory, to {real}",
        "copy the file into the directory, or pass the directory that really holds the files",
    )


def hub_blob_store(real_root: Path) -> Path | None:
    """Return the `blobs` folder of the hub cache that `real_root` is a snapshot of, or None if it is not one."""
    repository = real_root.parent.parent
    if real_root.parent.name == "snapshots" and repository.name.startswith("models--"):
        return repository / "blobs"
    return None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold one object; NaN and Infinity are allowed because model configs use them.

    Raises:
        InputError: not a plain file, larger than 100 MB, not UTF-8, not JSON, repeated keys, or not an object.
    """
    return parse_json_object(read_small_file(path), str(path), allow_constants=True)


def read_small_file(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a plain file of at most `limit` bytes; InputError otherwise."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise InputError(f"{path} is {size:,} bytes; at most {limit:,} are expected in such a file")
        return pread_exactly(descriptor, size, 0, path)
    finally:
        os.close(descriptor)


def parse_json_object(raw: bytes, where: str, *, allow_constants: bool = False) -> dict[str, Any]:
    """Parse untrusted JSON that must be one object.

    Args:
        raw: UTF-8 text, surrounding JSON white space allowed.
        where: what is being read, for the error message.
        allow_constants: accept NaN, Infinity and -Infinity.

    Raises:
        InputError: anything that is wrong with it.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_int=_strict_int,
            parse_constant=None if allow_constants else _refuse_constant,
        )
    except RecursionError as error:
        raise InputError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:  # covers JSONDecodeError, UnicodeDecodeError and integers of thousands of digits
        raise InputError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:200]!r} appears twice")
            seen.add(key)
    return result


def _strict_int(text: str) -> int:
    if text == "-0":  # JSON readers of other languages take it for a float
        raise ValueError("-0 is not an integer")
    return int(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed here")
