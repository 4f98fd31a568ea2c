"""What a person should know about a plan although it is valid."""

from __future__ import annotations

from xmac_cli.prune_moe.allocation import Constraints
from xmac_cli.prune_moe.layout import Layout
from xmac_cli.prune_moe.plan_file import Plan

# Counts that vLLM's fused top-k kernel is compiled for (vllm-project/vllm#50982).
SERVED_COUNTS = frozenset((1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576))


def plan_warnings(plan: Plan, layout: Layout, limits: Constraints) -> tuple[str, ...]:
    """One sentence for each thing that may surprise.

    Args:
        plan: with its amounts.
        layout: of the source.
        limits: of its routers.
    """
    notes: list[str] = []
    if plan.export == "plan-only":
        notes.append("the plan has different counts per layer and cannot be applied")
        return tuple(notes)
    ratio = plan.requested.get("ratio")
    if ratio is not None and abs(plan.actual_ratio - ratio) * plan.n_before > 0.5:
        notes.append(
            f"{plan.actual_ratio:.1%} of the experts are removed instead of {ratio:.1%}: counts are multiples of "
            f"{limits.step}"
            if plan.export == "plain"
            else f"{plan.actual_ratio:.1%} of the experts are removed instead of {ratio:.1%}"
        )
    if plan.n_after == plan.n_before:
        notes.append("some layer keeps all its experts, so padded files are as large as before")
    elif plan.export == "pad":
        empty = sum(plan.n_after - len(layer.keep) for layer in plan.layers)
        if empty:
            notes.append(f"{empty} of {plan.n_after * len(plan.layers)} stored experts are empty slots")
    if plan.n_after not in SERVED_COUNTS and plan.n_before in SERVED_COUNTS:
        notes.append(
            f"some serving kernels are compiled for fixed expert counts, and {plan.n_after} is not among vLLM's "
            "(64, 128, 192, 256, ...); --align 16 or 64 helps"
        )
    parallel = [size for size in (2, 4, 8, 16) if plan.n_before % size == 0 and plan.n_after % size]
    if parallel:
        notes.append(f"{plan.n_after} experts do not divide over {parallel[0]} expert-parallel devices")
    notes += _mtp_notes(plan, layout)
    return tuple(notes)


def _mtp_notes(plan: Plan, layout: Layout) -> list[str]:
    if not layout.mtp_layers or plan.mtp == "drop":
        return []
    if plan.mtp == "keep":
        return [
            f"{len(layout.mtp_layers)} next-token layer(s) keep {layout.num_experts} experts; servers that build them "
            f"with {plan.n_after} will not load"
        ]
    return [f"{len(layout.mtp_layers)} next-token layer(s) are cut by a rule that uses no data"]
