"""Cut experts out of a checkpoint: a plan becomes byte ranges of the source files, and nothing is ever dequantised.

A kept expert with its own tensors is a rename. A tensor that holds all experts is the list of its kept slices, which
are contiguous when the expert axis comes first (also [1, E], and DBRX's flattened [E * f, d]). Only a small tensor with
the expert axis further inside goes through memory. Padded slots (`export: pad`) get zero weights, a zero router row and
a selection bias so negative that the slot is never chosen.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from xmac_cli.checkpoint.fingerprint import local_identity
from xmac_cli.checkpoint.header import ShardHeader, TensorInfo
from xmac_cli.checkpoint.output import StagedOutput, check_destination, write_checkpoint
from xmac_cli.checkpoint.writer import ByteRange, PlannedTensor, ShardPlan
from xmac_cli.cli.errors import ConstraintError, UnsupportedModelError
from xmac_cli.cli.progress import Progress
from xmac_cli.prune_moe.allocation import place_in_slots
from xmac_cli.prune_moe.layout import Claim, Layout, MoELayer, sniff_layout
from xmac_cli.prune_moe.mtp import plan_mtp_layers
from xmac_cli.prune_moe.plan_check import check_plan, constraints_of
from xmac_cli.prune_moe.plan_file import MtpPolicy, Plan, PlanLayer, load_plan
from xmac_cli.prune_moe.provenance import write_provenance
from xmac_cli.prune_moe.pruned_config import pruned_config

Slots = tuple[int | None, ...]
# Never chosen against any real router score, and still an ordinary number in every dtype that routers use.
_DISABLED = {"F32": struct.pack("<f", -1e9), "F64": struct.pack("<d", -1e9), "F16": struct.pack("<e", -65504.0)}
_DISABLED["BF16"] = _DISABLED["F32"][2:]
_SHARED_METADATA = (".weight_shape", ".g_idx", ".weight_g_idx")


@dataclass(frozen=True)
class TensorCounts:
    """How many tensors of the source go which way, and how many are made up for padded slots."""

    copied: int = 0
    renamed: int = 0
    sliced: int = 0
    dropped: int = 0
    padded: int = 0


def apply_plan(
    src: Path | str,
    dst: Path | str,
    plan: Plan | Path,
    *,
    mtp: MtpPolicy | None = None,
    progress: Progress | None = None,
    resume: bool = False,
    overwrite: bool = False,
    link: bool = False,
    shards: tuple[int, int] | None = None,
) -> bool:
    """Write the pruned checkpoint; it appears at `dst` only when it is complete.

    Args:
        src: the source checkpoint; never modified.
        dst: the new directory.
        plan: a plan, or the path of a plan.json.
        mtp: another policy for next-token layers than the plan's.
        progress: shown while bytes are copied.
        resume: continue an interrupted run of the same plan and source.
        overwrite: replace an existing `dst`.
        link: share unchanged shards with the source.
        shards: (i, n): make only share i of n of the shards.

    Returns:
        True when `dst` is complete, False when other shares are missing.

    Raises:
        ConstraintError: the plan does not fit the checkpoint.
        UnsupportedModelError: no rule covers the checkpoint.
        ResumeMismatchError: what was left behind belongs to another plan or source.
    """
    layout = sniff_layout(Path(src))
    wanted = ready_plan(load_plan(plan) if isinstance(plan, Path) else plan, layout, mtp)
    destination = Path(dst)
    check_destination(layout.checkpoint.path, destination, overwrite)
    staged = StagedOutput(
        destination, overwrite=overwrite, resume=resume, job_key=job_key(layout, wanted), shares=shards
    )
    with staged:
        write_pruned(staged, layout, wanted, progress=progress, link=link)
        return staged.commit()


def ready_plan(plan: Plan, layout: Layout, mtp: MtpPolicy | None = None) -> Plan:
    """Check a plan and make sure that it can be applied.

    Raises:
        ConstraintError: it does not fit, or it is a plan only.
    """
    if mtp is not None and mtp != plan.mtp:
        cut = plan_mtp_layers(layout, plan.n_after, constraints_of(layout)) if mtp == "slice" else ()
        plan = replace(plan, mtp=mtp, mtp_layers=cut)
    checked = check_plan(plan, layout)
    if checked.export == "plan-only":
        raise ConstraintError(
            "layers of this plan keep different numbers of experts and its export is plan-only",
            "make the plan with --export pad or --export bounded",
        )
    if layout.checkpoint.config.get("xmac", {}).get("attachments"):
        raise ConstraintError(
            "this checkpoint carries attachments that are bound to its present weights", "prune first, then attach"
        )
    return checked


def job_key(layout: Layout, plan: Plan) -> str:
    """What a resumed run must have in common with the interrupted one: source and plan."""
    return hashlib.sha256(f"{local_identity(layout.checkpoint)} {plan.sha256()}".encode()).hexdigest()


def write_pruned(
    staged: StagedOutput,
    layout: Layout,
    plan: Plan,
    *,
    progress: Progress | None = None,
    link: bool = False,
) -> bool:
    """Write the pruned checkpoint into an entered `StagedOutput`; the caller commits.

    Args:
        plan: from `ready_plan`.

    Returns:
        True when the tree is complete (see `write_checkpoint`).
    """
    shards, _ = planned_shards(layout, plan, _zero_file(staged, layout, plan))
    config = pruned_config(layout.checkpoint.config, layout, plan)
    complete = write_checkpoint(
        staged, shards, config=config, source=layout.checkpoint, progress=progress, link=link, shards=staged.shares
    )
    if complete and not staged.finished:
        write_provenance(staged.path, layout, plan)
    return complete


def planned_shards(layout: Layout, plan: Plan, zeros: Path | None = None) -> tuple[list[ShardPlan], TensorCounts]:
    """One planned shard per source shard; a shard may be empty.

    Args:
        zeros: a sparse file of zeros at least as large as the largest tensor, for padded slots; None to keep zeros in
            memory (small checkpoints, dry runs).
    """
    tally = dict.fromkeys(TensorCounts.__dataclass_fields__, 0)
    slots = slots_by_block(plan)
    shards = [
        ShardPlan(shard.path.name, tuple(_shard_tensors(shard, layout, plan, slots, zeros, tally)), shard.metadata)
        for shard in layout.checkpoint.shards
    ]
    return shards, TensorCounts(**tally)


def slots_by_block(plan: Plan) -> dict[str, Slots]:
    """For every block that is cut, which old expert sits in each new slot (None = padded)."""

    def place(layer: PlanLayer) -> Slots:
        return place_in_slots(layer.keep, plan.n_after, plan.n_before, plan.groups[0])

    return {layer.name: place(layer) for layer in (*plan.layers, *plan.mtp_layers)}


def _shard_tensors(
    shard: ShardHeader,
    layout: Layout,
    plan: Plan,
    slots: dict[str, Slots],
    zeros: Path | None,
    tally: dict[str, int],
) -> Iterator[PlannedTensor]:
    for info in shard.tensors.values():
        if plan.mtp == "drop" and info.name in layout.mtp_tensors:
            tally["dropped"] += 1
            continue
        found = layout.claim(info.name)
        if found is None or found[1].kind == "keep" or found[0].name not in slots:
            tally["copied"] += 1
            yield PlannedTensor.copy_of(info)
            continue
        block, claim = found
        if claim.kind == "slice":
            tally["sliced"] += 1
            yield _slice_experts(info, claim, block, slots[block.name], zeros)
            continue
        seats = [slot for slot, expert in enumerate(slots[block.name]) if expert == claim.expert]
        tally["renamed" if seats else "dropped"] += 1
        for slot in seats:
            yield PlannedTensor.copy_of(info, _expert_name(block, slot, claim))
        if seats and claim.expert == next(expert for expert in slots[block.name] if expert is not None):
            for slot in (slot for slot, expert in enumerate(slots[block.name]) if expert is None):
                tally["padded"] += 1
                yield _empty_expert(info, _expert_name(block, slot, claim), zeros)


def _expert_name(block: MoELayer, slot: int, claim: Claim) -> str:
    return f"{block.name}.experts.{slot}.{claim.rest}"


def _empty_expert(info: TensorInfo, name: str, zeros: Path | None) -> PlannedTensor:
    """A tensor of a padded slot: zero weights; what describes the format is copied from a real expert."""
    if name.endswith(_SHARED_METADATA):
        return PlannedTensor.copy_of(info, name)
    return PlannedTensor(name, info.dtype, info.shape, (_zeros(info.nbytes, zeros),))


def _slice_experts(info: TensorInfo, claim: Claim, block: MoELayer, slots: Slots, zeros: Path | None) -> PlannedTensor:
    outer = 1
    for size in info.shape[: claim.axis]:
        outer *= size
    parts = outer * block.num_experts
    if info.nbytes % parts:
        raise UnsupportedModelError(f"one expert of {info.name} ({info.dtype}) is not a whole number of bytes")
    size = info.nbytes // parts
    filler = _filler(info, claim, size, zeros) if None in slots else b""
    pieces: list[ByteRange | bytes] = []
    for row in range(outer):
        start = info.start + row * block.num_experts * size
        pieces += [filler if e is None else ByteRange(info.file, start + e * size, size) for e in slots]
    if outer > 1:
        pieces = [_gather(info, pieces)]
    shape = list(info.shape)
    shape[claim.axis] = len(slots) * claim.rows
    return PlannedTensor(info.name, info.dtype, tuple(shape), tuple(pieces))


def _filler(info: TensorInfo, claim: Claim, size: int, zeros: Path | None) -> ByteRange | bytes:
    if claim.role != "bias":
        return _zeros(size, zeros)
    entry = _DISABLED.get(info.dtype)
    if entry is None:
        raise UnsupportedModelError(f"selection bias {info.name} is stored as {info.dtype}, so slots cannot be padded")
    return entry * (size // len(entry))


def _zeros(size: int, zeros: Path | None) -> ByteRange | bytes:
    return bytes(size) if zeros is None else ByteRange(zeros, 0, size)


def _gather(info: TensorInfo, pieces: list[ByteRange | bytes]) -> bytes:
    """The pieces of a small tensor through memory."""
    with info.file.open("rb") as file:
        file.seek(info.start)
        data = file.read(info.nbytes)
    return b"".join(
        piece if isinstance(piece, bytes) else data[piece.offset - info.start :][: piece.length] for piece in pieces
    )


def _zero_file(staged: StagedOutput, layout: Layout, plan: Plan) -> Path | None:
    """A sparse file that stands for the weights of padded slots, so that they take no memory."""
    if plan.export != "pad" or staged.finished:
        return None
    size = max(info.nbytes for info in layout.checkpoint.tensors.values())
    path = staged.scratch / "zeros"
    if not path.exists() or path.stat().st_size != size:
        with path.open("wb") as file:
            file.truncate(size)
    return path
