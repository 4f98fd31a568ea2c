"""Writing one safetensors shard from byte ranges of other files, without holding a tensor in memory.

The header is planned from the plan alone and written first; then each tensor's pieces follow, adjacent ranges merged.
A second thread hashes what has been written while the rest is copied. The file is called NAME.tmp until it is complete
and on disk (fsync), then renamed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.copying import RangeCopier, clone_or_link, write_all
from xmac_cli.checkpoint.hashing import TrailingHash
from xmac_cli.checkpoint.header import ALIGNMENT, TensorInfo, dtype_bits, encode_header, read_header
from xmac_cli.cli.errors import InputError


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes of `file`, beginning at the absolute `offset`."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written.

    Args:
        name: name in the new file.
        dtype: safetensors dtype string, possibly unknown to us.
        shape: sizes of the axes.
        pieces: where the bytes come from, in order: ranges of files, or bytes in memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[ByteRange | bytes, ...]

    @classmethod
    def copy_of(cls, info: TensorInfo, name: str | None = None) -> PlannedTensor:
        """Plan the unchanged copy of a tensor, under another name if one is given."""
        pieces = (ByteRange(info.file, info.start, info.nbytes),)
        return cls(name or info.name, info.dtype, info.shape, pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return sum(piece.length if isinstance(piece, ByteRange) else len(piece) for piece in self.pieces)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardPlan:
    """A safetensors file to be written.

    Args:
        file_name: name in the output directory.
        tensors: in the wanted order; see `ordered` for when it is not kept.
        metadata: `__metadata__`, usually the source shard's.
    """

    file_name: str
    tensors: tuple[PlannedTensor, ...]
    metadata: dict[str, str]

    @cached_property
    def ordered(self) -> tuple[PlannedTensor, ...]:
        """The tensors in the order of the file.

        Readers map the file and need each tensor at a multiple of its item size. If the wanted order breaks that, wide
        dtypes are moved to the front (stable), as the safetensors library does.
        """
        offset = 0
        for tensor in self.tensors:
            if offset % _item_bytes(tensor):
                return tuple(sorted(self.tensors, key=_item_bytes, reverse=True))
            offset += tensor.nbytes
        return self.tensors

    @cached_property
    def header(self) -> bytes:
        """Length field and header of the file."""
        return encode_header(((t.name, t.dtype, t.shape, t.nbytes) for t in self.ordered), self.metadata)

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Bytes of the file as it is written from ranges (an unchanged shard keeps its own header and size)."""
        return len(self.header) + self.data_bytes


@dataclass(frozen=True)
class ShardRecord:
    """A file that has been written completely: name, bytes and sha256 (hex)."""

    file_name: str
    size: int
    sha256: str


def write_shard(
    plan: ShardPlan, directory: Path, *, on_bytes: Callable[[int], None] | None = None, link: bool = False
) -> ShardRecord:
    """Write one shard and wait until it is on disk under its final name.

    Args:
        plan: what to write.
        directory: an existing directory; `plan.file_name` in it is replaced.
        on_bytes: called with the number of bytes done since the last call; they add up to the size of the file.
        link: share storage with the source file (reflink or hard link) when the shard is an unchanged copy of it.

    Raises:
        InputError: the plan does not add up, or a source file has changed since its header was read.
    """
    return copy_shard(plan, directory, on_bytes=on_bytes, link=link).seal()


class PendingShard:
    """A shard whose bytes are copied, but which is not yet hashed to the end, synced and renamed."""

    def __init__(self, temporary: Path, final: Path, size: int, hasher: TrailingHash) -> None:
        self._temporary = temporary
        self._final = final
        self._size = size
        self._hasher = hasher

    def seal(self) -> ShardRecord:
        """Finish the hash, sync the file, give it its name, and sync the directory; may run in another thread."""
        sync_path(self._temporary)
        digest = self._hasher.hexdigest()
        self._temporary.rename(self._final)
        sync_path(self._final.parent)
        return ShardRecord(self._final.name, self._size, digest)


def copy_shard(
    plan: ShardPlan, directory: Path, *, on_bytes: Callable[[int], None] | None = None, link: bool = False
) -> PendingShard:
    """Do the copying part of `write_shard`, so that sealing can overlap with the next shard's copy."""
    check_plan(plan)
    final = directory / plan.file_name
    temporary = directory / f"{plan.file_name}.tmp"
    temporary.unlink(missing_ok=True)  # never opened for writing: it may be a hard link to the source
    report = on_bytes or (lambda count: None)
    unchanged = unchanged_source(plan)
    if unchanged is not None:
        size = unchanged.stat().st_size
        if link and clone_or_link(unchanged, temporary):
            report(size)
            return PendingShard(temporary, final, size, TrailingHash(temporary, written=size))
        pieces: Iterator[ByteRange | bytes] = iter((ByteRange(unchanged, 0, size),))
    else:
        size = plan.size
        pieces = coalesce([plan.header, *(piece for tensor in plan.ordered for piece in tensor.pieces)])
    hasher = _write_pieces(temporary, size, pieces, report)
    return PendingShard(temporary, final, size, hasher)


def _write_pieces(
    temporary: Path, size: int, pieces: Iterator[ByteRange | bytes], report: Callable[[int], None]
) -> TrailingHash:
    target = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(target, size)
        hasher = TrailingHash(temporary)

        def advance(count: int) -> None:
            hasher.advance(count)
            report(count)

        try:
            with RangeCopier() as copier:
                position = 0
                for piece in pieces:
                    if isinstance(piece, ByteRange):
                        copier.copy(piece.file, piece.offset, piece.length, target, position, advance)
                        position += piece.length
                    else:
                        write_all(target, piece, position)
                        advance(len(piece))
                        position += len(piece)
        except BaseException:
            hasher.abandon()
            raise
        hasher.finish()
        return hasher
    finally:
        os.close(target)


def coalesce(pieces: Sequence[ByteRange | bytes]) -> Iterator[ByteRange | bytes]:
    """Merge neighbouring pieces: ranges that continue each other in one file, and bytes that follow bytes."""
    pending: ByteRange | bytes = b""
    for piece in pieces:
        if isinstance(piece, bytes):
            if not piece:
                continue
            if isinstance(pending, bytes):
                pending += piece
                continue
        elif piece.length == 0:
            continue
        elif isinstance(pending, ByteRange) and _continues(pending, piece):
            pending = ByteRange(pending.file, pending.offset, pending.length + piece.length)
            continue
        if pending:
            yield pending
        pending = piece
    if pending:
        yield pending


def _continues(first: ByteRange, second: ByteRange) -> bool:
    return first.file == second.file and first.offset + first.length == second.offset


def unchanged_source(plan: ShardPlan) -> Path | None:
    """Return the file that already is what `plan` describes (same tensors, offsets and metadata), or None."""
    files = {piece.file for tensor in plan.tensors for piece in tensor.pieces if isinstance(piece, ByteRange)}
    if len(files) != 1:
        return None
    file = files.pop()
    merged = list(coalesce([piece for tensor in plan.ordered for piece in tensor.pieces]))
    if len(merged) != 1:
        return None
    header = read_header(file)
    if header.data_start % ALIGNMENT or header.metadata != plan.metadata:
        return None
    if merged[0] != ByteRange(file, header.data_start, header.data_bytes):
        return None
    stored = [(info.name, info.dtype, info.shape, info.nbytes) for info in header.tensors.values()]
    planned = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in plan.ordered]
    return file if stored == planned else None


def check_plan(plan: ShardPlan) -> None:
    """Raise InputError when a planned tensor's pieces do not add up to dtype x shape."""
    for tensor in plan.tensors:
        bits = dtype_bits(tensor.dtype)
        if bits is not None and tensor.numel * bits != tensor.nbytes * 8:
            raise InputError(
                f"{plan.file_name}: {tensor.name!r}, {tensor.dtype} of shape {list(tensor.shape)}, is planned with "
                f"{tensor.nbytes:,} bytes"
            )


def sync_path(path: Path) -> None:
    """Force a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file: NAME.tmp, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
    sync_path(path.parent)


def write_index(directory: Path, plans: Sequence[ShardPlan], original_index: Mapping[str, Any] | None) -> None:
    """Write model.safetensors.index.json for the given shards.

    Args:
        directory: where the shards are.
        plans: all shards under their final names.
        original_index: index of the source; its other metadata is kept, its totals are recomputed.
    """
    metadata = dict((original_index or {}).get("metadata") or {})
    metadata["total_size"] = sum(plan.data_bytes for plan in plans)
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(tensor.numel for plan in plans for tensor in plan.tensors)
    weight_map = {tensor.name: plan.file_name for plan in plans for tensor in plan.tensors}
    index = {"metadata": metadata, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_durably(directory / "model.safetensors.index.json", text.encode("utf-8"))


def _item_bytes(tensor: PlannedTensor) -> int:
    bits = dtype_bits(tensor.dtype)
    if bits is None:  # an unknown dtype: as wide as its data says, if that is a power of two up to 8
        width = tensor.nbytes // tensor.numel if tensor.numel and tensor.nbytes % tensor.numel == 0 else 1
        return width if width in (2, 4, 8) else 1
    return max(bits // 8, 1)
