"""From scores and a budget to a plan, and from an edited plan back to certainty that it fits the checkpoint.

Allocation "uniform": every layer keeps the same number n' = n - round_half_up(ratio * n). Allocation "global"
(Shapley-MoE, section 3.1): the lowest experts of all layers go. Unequal counts are stored by padding (exact for routers
with a selection bias, where a slot can be disabled), or by giving every layer the largest count ("bounded").
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from xmac_cli.checkpoint.hashing import hash_file
from xmac_cli.cli.errors import ConstraintError, InputError, UsageError
from xmac_cli.prune_moe.allocation import (
    Constraints,
    Kept,
    check_count,
    drop_lowest,
    fill_slots,
    keep_best,
    round_half_up,
    round_up_to_step,
    slots_needed,
)
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.layout import Layout
from xmac_cli.prune_moe.mtp import plan_mtp_layers
from xmac_cli.prune_moe.plan_check import (
    check_plan,
    constraints_of,
    finish_plan,
    identify_source,
    measure,
    no_padding,
    plan_layer,
    with_keep,
)
from xmac_cli.prune_moe.plan_file import Amounts, Export, MtpPolicy, Plan, PlanLayer, load_plan, save_plan
from xmac_cli.prune_moe.scores import ExpertScores, LayerScores

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Plan",
    "check_plan",
    "constraints_of",
    "load_plan",
    "make_plan",
    "placeholder_scores",
    "save_plan",
    "super_experts",
    "with_keep",
]

Allocation = Literal["uniform", "global"]


def make_plan(
    layout: Layout,
    scores: ExpertScores,
    budget: Budget,
    *,
    allocation: Allocation = "uniform",
    export: Literal["auto", "pad", "bounded", "plan-only"] = "auto",
    align: int = 1,
    protect: Collection[tuple[int, int]] = (),
    layers: Collection[int] | None = None,
    mtp: MtpPolicy = "slice",
    scores_file: Path | None = None,
    headers_only: bool = False,
) -> Plan:
    """Decide which experts stay.

    Args:
        layout: of the checkpoint.
        scores: importance of every expert of every MoE layer; higher = keep.
        budget: how much to remove.
        allocation: one count for all layers, or one ranking over all layers.
        export: how unequal counts are stored; "auto" pads where that is exact, else bounds.
        align: stored counts are multiples of this.
        protect: (layer, expert) pairs that stay.
        layers: decoder layers to prune; the others keep every expert, which needs padding.
        mtp: what happens to next-token layers.
        scores_file: recorded in the plan by name and hash.
        headers_only: read no weights: next-token layers are not ranked but keep their first experts (for dry runs).

    Raises:
        ConstraintError: the demand cannot be met; the message says what can.
        UsageError, InputError: an option or the scores do not fit the checkpoint.
    """
    limits = constraints_of(layout, align)
    phis = _scores_by_layer(layout, scores)
    guarded = _protected_by_layer(layout, protect)
    chosen = _chosen_layers(layout, layers)
    form = _export_form(layout, allocation, export, partial=len(chosen) < len(layout.layers))

    def build(kept: list[Kept], count: int, mtp_layers: tuple[PlanLayer, ...]) -> Plan:
        return Plan(
            source=identify_source(layout.checkpoint),
            family=layout.family.name,
            model_type=layout.model_type,
            top_k=layout.top_k,
            groups=(layout.n_group, layout.topk_group),
            n_before=layout.num_experts,
            n_after=count,
            allocation=allocation,
            export=form,
            requested={budget.kind: budget.value},
            criterion=scores.criterion,
            scores=_describe(scores_file),
            layers=tuple(plan_layer(layer, ids) for layer, ids in zip(layout.layers, kept)),
            mtp=mtp,
            mtp_layers=mtp_layers,
            amounts=Amounts(0, 0, 0, 0, 0),
        )

    def first_experts(count: int) -> tuple[PlanLayer, ...]:
        return tuple(plan_layer(block, tuple(range(count))) for block in layout.mtp_layers) if mtp == "slice" else ()

    def trial(kept: list[Kept], count: int) -> Amounts:
        """Amounts before the next-token layers are ranked, which needs their weights."""
        return measure(layout, build(kept, count, first_experts(count)))

    demand = _Demand(phis, guarded, chosen, budget, limits, form, trial)
    kept, count = _uniform(demand) if allocation == "uniform" else _global(demand)
    mtp_layers: tuple[PlanLayer, ...] = ()
    if mtp == "slice" and count < layout.num_experts and form != "plan-only":
        mtp_layers = first_experts(count) if headers_only else plan_mtp_layers(layout, count, limits)
    return finish_plan(build(kept, count, mtp_layers), layout, limits)


def placeholder_scores(layout: Layout) -> ExpertScores:
    """Scores for a dry run without scores: counts are right, the choice of experts means nothing."""
    import numpy as np

    phi = -(np.arange(layout.num_experts) % (layout.num_experts // layout.n_group)).astype(np.float64)
    return ExpertScores("placeholder", tuple(LayerScores(layer.name, layer.layer, phi) for layer in layout.layers))


def super_experts(scores: ExpertScores, *, quantile: float = 0.995, share: float = 0.1) -> set[tuple[int, int]]:
    """Experts with extreme activations, which must not be dropped (arXiv 2507.23279).

    An expert counts when its largest |activation| exceeds both the quantile over all experts and a share of the
    maximum; only the first 75 % of layers are looked at, as in CerebrasResearch/reap.

    Raises:
        InputError: the scores carry no `max_activation`.
    """
    import numpy as np

    if any("max_activation" not in layer.extra for layer in scores.layers):
        raise InputError("these scores have no `max_activation`", "score again, or leave --protect-super away")
    first = scores.layers[: max(1, int(len(scores.layers) * 0.75))]
    every = np.concatenate([np.asarray(layer.extra["max_activation"], np.float64) for layer in scores.layers])
    bar = max(float(np.quantile(every, quantile)), share * float(every.max()))
    return {
        (layer.layer, int(expert))
        for layer in first
        for expert in np.flatnonzero(np.asarray(layer.extra["max_activation"]) > bar)
    }


@dataclass(frozen=True)
class _Demand:
    """What is asked of an allocation.

    Args:
        phis: float64 [n] per MoE layer.
        guarded: protected experts per MoE layer.
        chosen: positions of the layers that are pruned.
        budget: how much goes.
        limits: of the router.
        form: how unequal counts are stored.
        trial: sizes that a choice would lead to.
    """

    phis: list[np.ndarray]
    guarded: list[frozenset[int]]
    chosen: list[int]
    budget: Budget
    limits: Constraints
    form: Export
    trial: Callable[[list[Kept], int], Amounts]


def _uniform(ask: _Demand) -> tuple[list[Kept], int]:
    everything = tuple(range(ask.limits.num_experts))

    def select(count: int) -> tuple[list[Kept], int]:
        if ask.form != "pad":
            return [keep_best(phi, count, ask.limits, safe) for phi, safe in zip(ask.phis, ask.guarded)], count
        removed = ask.limits.num_experts - count
        kept = [everything] * len(ask.phis)
        for index in ask.chosen:
            kept[index] = drop_lowest(
                [ask.phis[index]], removed, ask.limits, floor=ask.limits.smallest_count, protected=[ask.guarded[index]]
            )[0]
        return kept, slots_needed(kept, ask.limits)

    if ask.budget.kind in ("ratio", "keep"):
        count = int(ask.budget.value)
        if ask.budget.kind == "ratio":
            count = ask.limits.num_experts - round_half_up(float(ask.budget.value) * ask.limits.num_experts)
            count = count if ask.form == "pad" else round_up_to_step(count, ask.limits)
        check_count(count, replace(ask.limits, n_group=1, align=1) if ask.form == "pad" else ask.limits)
        return select(count)
    step = 1 if ask.form == "pad" else ask.limits.step
    lowest, highest = -(-ask.limits.smallest_count // step), (ask.limits.num_experts - 1) // step
    return _largest_that_fits(lowest, highest, lambda units: select(units * step), ask.budget, ask.trial)


def _global(ask: _Demand) -> tuple[list[Kept], int]:
    players = ask.limits.num_experts * len(ask.chosen)

    def select(removed: int) -> tuple[list[Kept], int]:
        kept: list[Kept] = [tuple(range(ask.limits.num_experts))] * len(ask.phis)
        picked = drop_lowest(
            [ask.phis[i] for i in ask.chosen],
            removed,
            ask.limits,
            floor=ask.limits.global_floor,
            protected=[ask.guarded[i] for i in ask.chosen],
        )
        for index, ids in zip(ask.chosen, picked):
            kept[index] = ids
        count = slots_needed(kept, ask.limits) if ask.form != "plan-only" else max(map(len, kept))
        return (fill_slots(ask.phis, kept, count, ask.limits) if ask.form == "bounded" else kept), count

    if ask.budget.kind == "ratio":
        removed = round_half_up(float(ask.budget.value) * players)
    elif ask.budget.kind == "keep":
        removed = players - int(ask.budget.value) * len(ask.chosen)
    else:
        fewest = sum(max(ask.limits.global_floor, len(ask.guarded[i])) for i in ask.chosen)
        return _largest_that_fits(fewest, players - 1, lambda left: select(players - left), ask.budget, ask.trial)
    if not 0 < removed < players:
        raise ConstraintError(f"this budget removes {removed} of {players} experts")
    kept, count = select(removed)
    if ask.form == "bounded" and count >= ask.limits.num_experts:
        raise ConstraintError(
            "some layer keeps all of its experts, so giving every layer the largest count removes nothing",
            "use --allocation uniform, a larger ratio, or --export plan-only",
        )
    return kept, count


def _largest_that_fits(
    lowest: int,
    highest: int,
    select: Callable[[int], tuple[list[Kept], int]],
    budget: Budget,
    trial: Callable[[list[Kept], int], Amounts],
) -> tuple[list[Kept], int]:
    """Bisect for the largest number that stays within a target; sizes grow with it."""

    def amount(number: int) -> int:
        amounts = trial(*select(number))
        return amounts.parameters_after if budget.kind == "target_params" else amounts.bytes_after

    if lowest > highest:
        raise ConstraintError("no count of experts is small enough and large enough at once", "check --align")
    unit = "parameters" if budget.kind == "target_params" else "bytes"
    before = trial(*select(highest))
    whole = before.parameters_before if budget.kind == "target_params" else before.bytes_before
    if whole <= budget.value:
        raise ConstraintError(f"the checkpoint already has only {whole:,} {unit}; nothing needs to be removed")
    smallest = amount(lowest)
    if smallest > budget.value:
        raise ConstraintError(f"even the smallest allowed result has {smallest:,} {unit}, target {budget.value:,}")
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        if amount(middle) <= budget.value:
            lowest = middle
        else:
            highest = middle - 1
    return select(lowest)


def _scores_by_layer(layout: Layout, scores: ExpertScores) -> list[np.ndarray]:
    phis = []
    for block in layout.layers:
        phi = scores.for_layer(block.layer).phi
        if len(phi) != block.num_experts:
            raise InputError(
                f"layer {block.layer} has {block.num_experts} experts, but {len(phi)} scores",
                "score this checkpoint again",
            )
        phis.append(phi)
    return phis


def _protected_by_layer(layout: Layout, protect: Collection[tuple[int, int]]) -> list[frozenset[int]]:
    known = {block.layer for block in layout.layers}
    for layer, expert in protect:
        if layer not in known or not 0 <= expert < layout.num_experts:
            raise UsageError(f"--protect {layer}:{expert} names no routed expert of this model")
    return [frozenset(expert for layer, expert in protect if layer == block.layer) for block in layout.layers]


def _chosen_layers(layout: Layout, layers: Collection[int] | None) -> list[int]:
    if layers is None:
        return list(range(len(layout.layers)))
    known = [block.layer for block in layout.layers]
    unknown = sorted(set(layers) - set(known))
    if unknown or not layers:
        raise UsageError(f"--layers names {unknown or 'nothing'}; the MoE layers are {known}")
    return [index for index, layer in enumerate(known) if layer in set(layers)]


def _export_form(layout: Layout, allocation: str, export: str, *, partial: bool) -> Export:
    if export == "plan-only":
        return "plan-only"
    if export == "pad" or (export == "auto" and layout.family.paddable and (partial or allocation == "global")):
        if not layout.family.paddable:
            raise ConstraintError(no_padding(layout), "use --export bounded, or --export plan-only for the plan alone")
        return "pad"
    if partial:
        raise ConstraintError(
            f"--layers would leave layers with different counts, and {no_padding(layout)}", "prune all MoE layers"
        )
    return "plain" if allocation == "uniform" else "bounded"


def _describe(scores_file: Path | None) -> dict[str, str] | None:
    if scores_file is None:
        return None
    return {"file": scores_file.name, "sha256": hash_file(scores_file)}
