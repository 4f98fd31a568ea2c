"""The header of a safetensors file, read without touching the data.

A file is: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}} that starts with "{"
and may be padded with spaces, then the data. Offsets count from the first data byte; tensors cover the data exactly:
begin <= end, no holes, no overlap, nothing after the last one. Header at most 100 MB. `__metadata__` maps str to str.
Source: https://huggingface.co/docs/safetensors, "Format"; dtype names of safetensors 0.8.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from xmac_cli.checkpoint.files import open_regular, parse_json_object, pread_exactly
from xmac_cli.cli.errors import InputError

MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 8
_LENGTH_BYTES = 8
_LARGEST_U64 = 2**64 - 1

_DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def dtype_bits(dtype: str) -> int | None:
    """Return the bits of one element of a safetensors dtype, or None for a dtype we do not know."""
    return _DTYPE_BITS.get(dtype)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Args:
        name: tensor name as stored.
        dtype: safetensors dtype string, for example "BF16"; possibly one we do not know.
        shape: sizes of the axes; () for a scalar.
        file: the safetensors file.
        start: offset of the first byte in the file (not in the data section).
        end: offset behind the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.end - self.start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardHeader:
    """One validated safetensors header.

    Args:
        path: the file.
        metadata: `__metadata__`, empty when absent.
        tensors: by name, in the order of the data.
        data_start: offset of the first data byte.
        size: bytes of the whole file.
    """

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    data_start: int
    size: int

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of tensor data."""
        return self.size - self.data_start


def read_header(path: Path) -> ShardHeader:
    """Read and validate the header of a safetensors file; the data is not read.

    Args:
        path: a safetensors file.

    Returns:
        The header, tensors ordered by offset.

    Raises:
        InputError: the file breaks a rule of the format (module docstring).
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        raw = _read_raw_header(descriptor, size, path)
    finally:
        os.close(descriptor)
    entries = parse_json_object(raw, f"{path}: header")
    data_start = _LENGTH_BYTES + len(raw)
    metadata = _parse_metadata(entries.pop("__metadata__", {}), path)
    tensors = [_parse_entry(name, entry, path, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _check_coverage(tensors, path, data_start, size)
    return ShardHeader(path, metadata, {tensor.name: tensor for tensor in tensors}, data_start, size)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Build the bytes in front of the data: length and JSON, padded with spaces to a multiple of 8.

    Args:
        tensors: (name, dtype, shape, bytes) in the order of the data.
        metadata: written as `__metadata__` unless empty.

    Returns:
        Length field and header; the data starts right behind it, 8-byte aligned.

    Raises:
        InputError: a name is used twice or reserved, or the header would exceed 100 MB.
    """
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(metadata)
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        if name == "__metadata__" or name in entries:
            raise InputError(f"the tensor name {name!r} cannot be written: it is reserved or used twice")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise InputError(f"the header would take {len(text):,} bytes; the format allows {MAX_HEADER_BYTES:,}")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _read_raw_header(descriptor: int, size: int, path: Path) -> bytes:
    if size < _LENGTH_BYTES:
        raise InputError(f"{path} is {size} bytes long; a safetensors file has at least {_LENGTH_BYTES}")
    length = int.from_bytes(pread_exactly(descriptor, _LENGTH_BYTES, 0, path), "little")
    if length > MAX_HEADER_BYTES:
        raise InputError(f"{path}: header length {length:,} exceeds the format's {MAX_HEADER_BYTES:,} bytes")
    if _LENGTH_BYTES + length > size:
        raise InputError(
            f"{path}: the header should take {length:,} bytes but the file ends after {size:,}",
            "the file is truncated or not safetensors; download it again",
        )
    # The first byte is looked at before the rest is loaded: most files that are not safetensors end here.
    if length == 0 or pread_exactly(descriptor, 1, _LENGTH_BYTES, path) != b"{":
        raise InputError(f"{path}: the header does not begin with '{{', so this is not a safetensors file")
    return pread_exactly(descriptor, length, _LENGTH_BYTES, path)


def _parse_metadata(value: Any, path: Path) -> dict[str, str]:
    if value is None:  # the reference reader takes null for "no metadata"
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise InputError(f"{path}: __metadata__ must map strings to strings")
    for key, item in value.items():
        _check_text(key, path)
        _check_text(item, path)
    return value


def _parse_entry(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    _check_text(name, path)
    if not isinstance(entry, dict):
        raise _flawed(path, name, "expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not dtype:
        raise _flawed(path, name, "dtype is missing or not a string")
    _check_text(dtype, path)
    if not _are_sizes(shape):
        raise _flawed(path, name, "shape must be a list of integers from 0 to 2^64-1")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _flawed(path, name, "data_offsets must be two integers from 0 to 2^64-1")
    begin, end = offsets
    if begin > end:
        raise _flawed(path, name, f"begins at {begin:,} and ends before it, at {end:,}")
    _check_size(dtype, shape, end - begin, path, name)
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, data_start + end)


def _flawed(path: Path, name: str, what: str) -> InputError:
    return InputError(f"{path}: tensor {name[:200]!r}: {what}")


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    # bool is a subclass of int, hence the exact types.
    return type(value) is list and all(type(item) is int and 0 <= item <= _LARGEST_U64 for item in value)


def _check_text(text: str, path: Path) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: the header contains half of a surrogate pair, which is not text") from error


def _check_size(dtype: str, shape: list[int], nbytes: int, path: Path, name: str) -> None:
    numel = 1
    for size in shape:
        numel *= size
        if numel > _LARGEST_U64:
            raise _flawed(path, name, f"shape {shape[:16]} has more elements than fit in 64 bits")
    bits = dtype_bits(dtype)
    if bits is None:
        return
    if numel * bits > _LARGEST_U64 or numel * bits % 8:
        raise _flawed(path, name, f"shape {shape[:16]} of {dtype} is not a whole number of bytes below 2^61")
    if numel * bits // 8 != nbytes:
        raise _flawed(path, name, f"shape {shape[:16]} of {dtype} takes {numel * bits // 8:,} bytes, not {nbytes:,}")


def _check_coverage(tensors: list[TensorInfo], path: Path, data_start: int, size: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise InputError(
                f"{path}: tensor {tensor.name[:200]!r} {kind}, at data offset {tensor.start - data_start:,}"
            )
        position = tensor.end
    if position > size:
        raise InputError(
            f"{path}: the tensors need {position:,} bytes but the file has {size:,}: {position - size:,} are missing",
            "the file is truncated; download it again",
        )
    if position < size:
        raise InputError(f"{path}: {size - position:,} bytes follow the last tensor; the format allows none")
