"""Two identities of a checkpoint: fast (what the headers say) and full (what every byte is).

Fast: config, and name, size and header of every shard. It notices another architecture, another conversion, a removed
expert; it does not notice other values in the same shapes. Full: sha256 of every file. The `xmac` entry of config.json
and the attachments it names do not count in the fast fingerprint, because they are bound to it themselves.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.directory import CONFIG_NAME, INDEX_NAME, Checkpoint
from xmac_cli.checkpoint.hashing import hash_files


def fast_fingerprint(checkpoint: Checkpoint) -> str:
    """Identify a checkpoint by its config, file sizes and headers, without reading data.

    Args:
        checkpoint: an opened checkpoint.

    Returns:
        "fast-1:" and 64 hex digits. Moving or renaming the directory does not change it.
    """
    digest = hashlib.sha256(_canonical({k: v for k, v in checkpoint.config.items() if k != "xmac"}))
    for shard in checkpoint.shards:
        tensors = [[info.name, info.dtype, info.shape, info.start, info.end] for info in shard.tensors.values()]
        digest.update(_canonical([shard.path.name, shard.size, sorted(shard.metadata.items()), tensors]))
    return f"fast-1:{digest.hexdigest()}"


def full_fingerprint(checkpoint: Checkpoint, threads: int | None = None) -> str:
    """Identify a checkpoint by the sha256 of its config, index, shards and auxiliary files.

    Args:
        checkpoint: an opened checkpoint; all of its bytes are read.
        threads: files hashed at the same time; None for one per core.

    Returns:
        "full-1:" and 64 hex digits.
    """
    names = [CONFIG_NAME, *(shard.path.name for shard in checkpoint.shards)]
    names += [INDEX_NAME] if checkpoint.index is not None else []
    names += [relative.as_posix() for relative in checkpoint.auxiliary_files]
    hashes = hash_files([checkpoint.path / name for name in names], threads)
    lines = sorted((path.relative_to(checkpoint.path).as_posix(), value) for path, value in hashes.items())
    return f"full-1:{hashlib.sha256(_canonical(lines)).hexdigest()}"


def local_identity(checkpoint: Checkpoint) -> str:
    """Identify a checkpoint on this machine: the fast fingerprint, and time stamps of the shards.

    Used to decide whether interrupted work may be continued: weights that were replaced in place by others of the same
    shapes have another time stamp.
    """
    stamps = [(shard.path.name, Path(shard.path).stat().st_mtime_ns) for shard in checkpoint.shards]
    return hashlib.sha256(_canonical([fast_fingerprint(checkpoint), stamps])).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"
