"""Writing a whole checkpoint: shards in a pipeline, then config, index and the files that travel along.

While a few shards are hashed and synced by other threads, the next one is already being copied by the kernel.
Same plans, same bytes: interrupted and resumed, split with `--shards i/n`, or in one go.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from xmac_cli.checkpoint.auxiliary import attachment_folders
from xmac_cli.checkpoint.copying import RangeCopier
from xmac_cli.checkpoint.destination import check_destination, check_free_space
from xmac_cli.checkpoint.directory import CONFIG_NAME, SINGLE_NAME, Checkpoint
from xmac_cli.checkpoint.files import contained_file, read_small_file
from xmac_cli.checkpoint.staging import StagedOutput
from xmac_cli.checkpoint.writer import (
    PendingShard,
    ShardPlan,
    check_plan,
    copy_shard,
    unchanged_source,
    write_durably,
    write_index,
)
from xmac_cli.cli.errors import ConstraintError, UsageError
from xmac_cli.cli.progress import NullProgress, Progress

__all__ = ["StagedOutput", "check_destination", "check_free_space", "name_shards", "write_checkpoint"]

_SLACK_BYTES = 64 << 20
_MOST_SEALERS = 4


def name_shards(plans: Sequence[ShardPlan], source: Checkpoint) -> tuple[ShardPlan, ...]:
    """Drop empty shards and give the rest their final names.

    Args:
        plans: in the wanted order, usually one for each source shard.
        source: a single-file source gives a single file, anything else model-00001-of-0000N.safetensors.

    Raises:
        ConstraintError: no tensor is left.
    """
    filled = [plan for plan in plans if plan.tensors]
    if not filled:
        raise ConstraintError("the new checkpoint would hold no tensors")
    if len(filled) == 1 and source.index is None and len(source.shards) == 1:
        return (replace(filled[0], file_name=SINGLE_NAME),)
    total = len(filled)
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    return tuple(replace(plan, file_name=name) for plan, name in zip(filled, names))


def write_checkpoint(
    staged: StagedOutput,
    plans: Sequence[ShardPlan],
    *,
    config: dict[str, Any],
    source: Checkpoint,
    progress: Progress | None = None,
    link: bool = False,
    shards: tuple[int, int] | None = None,
) -> bool:
    """Write every shard that is not done yet, config.json, index and auxiliary files into `staged.path`.

    Args:
        staged: entered; the caller commits.
        plans: one per shard; names are assigned by `name_shards`.
        config: content of config.json; copied verbatim from the source when equal.
        source: where auxiliary files, index metadata and attachments come from.
        progress: shown while bytes are copied.
        link: reflink or hard-link shards that do not change.
        shards: must be `staged.shares`; says in the call that only this share is written.

    Returns:
        True when the tree is complete; False when other shares are missing (see StagedOutput.claim_completion).

    Raises:
        ConstraintError: nothing would be written.
        InputError: a plan does not add up, or a source file has changed.
        XmacError: not enough room on the disk, checked before the first byte.
    """
    if shards is not None and shards != staged.shares:
        raise UsageError(f"share {shards[0]}/{shards[1]} needs an output that was staged for it")
    if staged.finished:
        return True
    named = name_shards(plans, source)
    for plan in named:
        check_plan(plan)
    digests = {plan.file_name: plan_digest(plan) for plan in named}
    todo = [
        plan for plan in _share(named, staged.shares) if not staged.is_done(plan.file_name, digests[plan.file_name])
    ]
    check_free_space(staged.path, _needed_bytes(todo, source, link))
    _write_shards(staged, todo, digests, progress or NullProgress(), link)
    if not staged.claim_completion(set(digests)):
        return False
    _remove_strays(staged.path, set(digests))
    _write_config(staged.path, config, source)
    if len(named) > 1 or named[0].file_name != SINGLE_NAME:
        write_index(staged.path, named, source.index)
    for relative in source.auxiliary_files:
        _copy_file(source.path / relative, staged.path / relative)
    _copy_attachments(staged.path, config, source)
    return True


def plan_digest(plan: ShardPlan) -> str:
    """Hash everything that decides a shard's bytes: header, pieces, and size and time stamp of the source files."""
    digest = hashlib.sha256(plan.header)
    stamps: dict[Path, tuple[int, int]] = {}
    for tensor in plan.ordered:
        for piece in tensor.pieces:
            if isinstance(piece, bytes):
                digest.update(hashlib.sha256(piece).digest())
                continue
            if piece.file not in stamps:
                status = piece.file.stat()
                stamps[piece.file] = (status.st_size, status.st_mtime_ns)
            digest.update(f"{piece.file}\0{piece.offset}\0{piece.length}\0{stamps[piece.file]}\0".encode())
    return digest.hexdigest()


def _share(plans: tuple[ShardPlan, ...], share: tuple[int, int] | None) -> list[ShardPlan]:
    """Return the plans of share i of n: every n-th shard, so that shares are alike in size."""
    return list(plans) if share is None else list(plans[share[0] - 1 :: share[1]])


def _needed_bytes(todo: list[ShardPlan], source: Checkpoint, link: bool) -> int:
    needed = sum((source.path / relative).stat().st_size for relative in source.auxiliary_files) + _SLACK_BYTES
    return needed + sum(plan.size for plan in todo if not (link and unchanged_source(plan)))


def _write_shards(
    staged: StagedOutput, todo: list[ShardPlan], digests: dict[str, str], progress: Progress, link: bool
) -> None:
    """Copy shards one after the other while earlier ones are still hashed and synced, a few at a time."""
    recording = Lock()

    def seal(pending: PendingShard) -> None:
        record = pending.seal()
        with recording:
            staged.record(record, digests[record.file_name])

    sealers = min(_MOST_SEALERS, os.cpu_count() or 1)
    total = sum(plan.size for plan in todo)
    with progress.task("writing", total=total, unit="bytes") as task, ThreadPoolExecutor(sealers) as pool:
        unsealed: deque[Future[None]] = deque()
        for plan in todo:
            pending = copy_shard(plan, staged.path, on_bytes=task.advance, link=link)
            if len(unsealed) == sealers:
                unsealed.popleft().result()
            unsealed.append(pool.submit(seal, pending))
        for future in unsealed:
            future.result()


def _remove_strays(directory: Path, names: set[str]) -> None:
    """Remove shards that a resumed run with another number of shards left in the tree."""
    for path in directory.glob("*.safetensors"):
        if path.name not in names:
            path.unlink()


def _write_config(directory: Path, config: dict[str, Any], source: Checkpoint) -> None:
    if config == source.config:
        write_durably(directory / CONFIG_NAME, read_small_file(source.path / CONFIG_NAME))
        return
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    write_durably(directory / CONFIG_NAME, text.encode("utf-8"))


def _copy_attachments(directory: Path, config: dict[str, Any], source: Checkpoint) -> None:
    """Copy the folders of the attachments that config.json still names, unless the verb has written them itself."""
    for folder in attachment_folders(source.path, config).values():
        if (directory / folder).exists():
            continue
        for path in sorted((source.path / folder).rglob("*")):
            relative = path.relative_to(source.path)
            if path.is_file():
                _copy_file(contained_file(source.path, relative.as_posix()), directory / relative)


def _copy_file(source: Path, target: Path) -> None:
    """Copy a small file; StagedOutput.commit syncs it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    size = source.stat().st_size
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(descriptor, size)
        with RangeCopier() as copier:
            copier.copy(source, 0, size, descriptor, 0, lambda count: None)
    finally:
        os.close(descriptor)
