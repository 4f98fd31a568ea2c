"""Accounting of a pruned checkpoint: every tensor of it is, byte for byte, a tensor of the source or a declared slice.

Written apart from the surgery on purpose: expected names and offsets are derived again from the plan, and both files
are read and compared. Padded slots must hold zeros, and a selection bias that no router score can outweigh.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.header import TensorInfo
from xmac_cli.cli.errors import VerificationError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.prune_moe.families import COUNT_KEYS, config_holders
from xmac_cli.prune_moe.layout import Claim, Layout
from xmac_cli.prune_moe.plan_file import Plan, PlanLayer

_CHUNK = 8 << 20
_DISABLED_BELOW = -6e4
_COPIED_TO_EMPTY_SLOTS = ("weight_shape", "g_idx", "weight_g_idx")


@dataclass(frozen=True)
class _Expected:
    """One tensor that the result must have: `source` as it is, or the experts of `order` along the claim's axis.

    An entry of `order` is None for an empty slot; a whole tensor of an empty slot has `empty` set.
    """

    source: TensorInfo
    claim: Claim | None = None
    order: tuple[int | None, ...] = ()
    empty: bool = False


def verify_files(layout: Layout, plan: Plan, result: Path, *, progress: Progress | None = None) -> int:
    """Compare every tensor of a pruned checkpoint with the source.

    Args:
        layout: of the source.
        plan: that was applied.
        result: the pruned directory.

    Returns:
        Number of tensors compared.

    Raises:
        VerificationError: naming the first tensor or config key that is wrong.
    """
    written = Checkpoint.open(result)
    expected = dict(_expected_tensors(layout, plan))
    missing, extra = expected.keys() - written.tensors.keys(), written.tensors.keys() - expected.keys()
    if missing or extra:
        raise VerificationError(
            f"{result} lacks {len(missing)} tensors and has {len(extra)} that it should not have: "
            + ", ".join(sorted(missing | extra)[:3])
        )
    _check_config(written, plan)
    total = sum(tensor.nbytes for tensor in written.tensors.values())
    with (progress or NullProgress()).task("verifying", total=total, unit="bytes") as task, _Files() as files:
        for name, tensor in written.tensors.items():
            _check_header(tensor, expected[name], plan)
            if not _same_bytes(tensor, expected[name], layout, files):
                raise VerificationError(
                    f"{name} of {result} is not what the plan takes from {expected[name].source.name}"
                )
            task.advance(tensor.nbytes)
    return len(expected)


def _expected_tensors(layout: Layout, plan: Plan) -> Iterator[tuple[str, _Expected]]:
    choices: dict[str, PlanLayer] = {layer.name: layer for layer in (*plan.layers, *plan.mtp_layers)}
    for name, source in layout.checkpoint.tensors.items():
        if plan.mtp == "drop" and name in layout.mtp_tensors:
            continue
        found = layout.claim(name)
        choice = choices.get(found[0].name) if found else None
        if found is None or choice is None or found[1].kind == "keep":
            yield name, _Expected(source)
            continue
        claim, order = found[1], _order(choice, plan)
        if claim.kind == "slice":
            yield name, _Expected(source, claim, order)
            continue
        for position, expert in enumerate(order):
            new_name = f"{choice.name}.experts.{position}.{claim.rest}"
            if expert == claim.expert:
                yield new_name, _Expected(source)
            elif expert is None and claim.expert == choice.keep[0]:
                yield new_name, _Expected(source, empty=not claim.rest.endswith(_COPIED_TO_EMPTY_SLOTS))


def _order(choice: PlanLayer, plan: Plan) -> tuple[int | None, ...]:
    """Old expert id at each new position: ascending within a group, then the group's empty slots."""
    groups, size = plan.groups[0], plan.n_before // plan.groups[0]
    room = plan.n_after // groups
    order: list[int | None] = []
    for first in range(0, plan.n_before, size):
        members = sorted(expert for expert in choice.keep if first <= expert < first + size)
        order.extend(members)
        order.extend([None] * (room - len(members)))
    return tuple(order)


def _check_config(written: Checkpoint, plan: Plan) -> None:
    for holder in config_holders(written.config):
        for key in COUNT_KEYS:
            value = holder.get(key)
            wrong = [entry for entry in (value if isinstance(value, list) else [value]) if entry != plan.n_after]
            if value is not None and wrong:
                raise VerificationError(f"config.json of {written.path} says {key} = {value}, not {plan.n_after}")
    if written.index is not None:
        size = (written.index.get("metadata") or {}).get("total_size")
        if size is not None and size != written.total_bytes:
            raise VerificationError(
                f"the index of {written.path} says {size} bytes, its tensors have {written.total_bytes}"
            )


def _check_header(tensor: TensorInfo, expected: _Expected, plan: Plan) -> None:
    shape = list(expected.source.shape)
    if expected.claim is not None:
        shape[expected.claim.axis] = plan.n_after * expected.claim.rows
    if tensor.dtype != expected.source.dtype or list(tensor.shape) != shape:
        raise VerificationError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, expected {expected.source.dtype} {shape}"
        )


def _same_bytes(tensor: TensorInfo, expected: _Expected, layout: Layout, files: _Files) -> bool:
    source = expected.source
    if expected.empty:
        return files.is_zero(tensor.file, tensor.start, tensor.nbytes)
    if expected.claim is None:
        return files.equal(source.file, source.start, tensor.file, tensor.start, source.nbytes)
    rows = 1
    for size in source.shape[: expected.claim.axis]:
        rows *= size
    unit = source.nbytes // rows // layout.num_experts
    position = tensor.start
    for row in range(rows):
        base = source.start + row * layout.num_experts * unit
        for expert in expected.order:
            if expert is not None:
                same = files.equal(source.file, base + expert * unit, tensor.file, position, unit)
            elif expected.claim.role == "bias":
                same = _is_disabled(files.read(tensor.file, position, unit), tensor.dtype)
            else:
                same = files.is_zero(tensor.file, position, unit)
            if not same:
                return False
            position += unit
    return position == tensor.end


def _is_disabled(data: bytes, dtype: str) -> bool:
    padded = b"\0\0" + data if dtype == "BF16" else data
    code = {"BF16": "<f", "F32": "<f", "F16": "<e", "F64": "<d"}[dtype]
    return len(padded) == struct.calcsize(code) and struct.unpack(code, padded)[0] < _DISABLED_BELOW


class _Files:
    """Reads ranges of many files, at most a few open at a time."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, file: Path, offset: int, length: int) -> bytes:
        if file not in self._open:
            if len(self._open) >= 16:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._open[file], length, offset)

    def equal(self, file: Path, offset: int, other: Path, other_offset: int, length: int) -> bool:
        for done in range(0, length, _CHUNK):
            size = min(_CHUNK, length - done)
            data = self.read(file, offset + done, size)
            if len(data) != size or data != self.read(other, other_offset + done, size):
                return False
        return True

    def is_zero(self, file: Path, offset: int, length: int) -> bool:
        for done in range(0, length, _CHUNK):
            size = min(_CHUNK, length - done)
            if self.read(file, offset + done, size) != bytes(size):
                return False
        return True
