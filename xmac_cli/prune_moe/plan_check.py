"""What a plan means for a checkpoint: whether it fits, what it leaves, and whether an edited plan still works."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from xmac_cli.checkpoint.directory import CONFIG_NAME, INDEX_NAME, Checkpoint
from xmac_cli.checkpoint.files import read_small_file
from xmac_cli.checkpoint.parameters import parameter_count, quantization_section
from xmac_cli.cli.errors import ConstraintError
from xmac_cli.prune_moe.allocation import Constraints, Kept, check_count
from xmac_cli.prune_moe.layout import Layout, MoELayer
from xmac_cli.prune_moe.plan_file import Amounts, Plan, PlanLayer
from xmac_cli.prune_moe.plan_warnings import plan_warnings


def constraints_of(layout: Layout, align: int = 1) -> Constraints:
    """What the routers of a checkpoint demand."""
    return Constraints(
        num_experts=layout.num_experts,
        top_k=layout.top_k,
        n_group=layout.n_group,
        topk_group=layout.topk_group,
        group_floor=2 if layout.family.grouped == "top2" else 1,
        align=align,
    )


def check_plan(plan: Plan, layout: Layout) -> Plan:
    """Compare a plan, possibly edited, with a checkpoint.

    Returns:
        The plan with sizes and warnings computed anew.

    Raises:
        ConstraintError: the plan is for another checkpoint, or the result would not work; the message says where.
    """
    found = identify_source(layout.checkpoint)
    for key in ("config_sha256", "index_sha256"):
        if plan.source.get(key) != found[key]:
            raise ConstraintError(
                f"the plan was made for {plan.source.get('name')}, and {key} of {layout.checkpoint.path} differs",
                "make a plan for this checkpoint",
            )
    facts = {
        "family": (plan.family, layout.family.name),
        "top_k": (plan.top_k, layout.top_k),
        "groups": (plan.groups, (layout.n_group, layout.topk_group)),
        "n_before": (plan.n_before, layout.num_experts),
        "layers": ([x.name for x in plan.layers], [x.name for x in layout.layers]),
        "layer numbers": ([x.layer for x in plan.layers], [x.layer for x in layout.layers]),
    }
    for key, (planned, real) in facts.items():
        if planned != real:
            raise ConstraintError(f"`{key}` of the plan is {planned}, but the checkpoint has {real}")
    if plan.removed == 0:
        raise ConstraintError("the plan removes no expert")
    cuts_mtp = plan.mtp == "slice" and plan.n_after < plan.n_before and plan.export != "plan-only"
    if cuts_mtp and {x.name for x in plan.mtp_layers} != {x.name for x in layout.mtp_layers}:
        raise ConstraintError("the plan does not say which experts of the next-token layers stay")
    limits = constraints_of(layout)
    if plan.export != "plan-only":
        _check_stored_count(plan, limits)
    for layer in (*plan.layers, *plan.mtp_layers):
        _check_layer(layer, plan, limits, padded=plan.export == "pad" and layer in plan.layers)
    if plan.export == "pad" and not layout.family.paddable:
        raise ConstraintError(no_padding(layout))
    return finish_plan(plan, layout, limits)


def with_keep(plan: Plan, layout: Layout, keep: Mapping[int, Iterable[int]]) -> Plan:
    """The plan with other experts kept in some decoder layers, checked again.

    Args:
        keep: expert ids by decoder layer.
    """
    layers = tuple(
        plan_layer(block, tuple(sorted(keep.get(block.layer, planned.keep))))
        for block, planned in zip(layout.layers, plan.layers)
    )
    return check_plan(replace(plan, layers=layers), layout)


def identify_source(checkpoint: Checkpoint) -> dict[str, str]:
    """Name and hashes that tie a plan to a checkpoint: config.json, and the index or the header of a single file."""
    config = hashlib.sha256(read_small_file(checkpoint.path / CONFIG_NAME)).hexdigest()
    if checkpoint.index is not None:
        index = hashlib.sha256(read_small_file(checkpoint.path / INDEX_NAME)).hexdigest()
    else:
        digest = hashlib.sha256()
        for shard in checkpoint.shards:
            with shard.path.open("rb") as file:
                digest.update(file.read(shard.data_start))
        index = digest.hexdigest()
    return {"name": checkpoint.name, "config_sha256": config, "index_sha256": index}


def measure(layout: Layout, plan: Plan) -> Amounts:
    """Parameters and bytes of the checkpoint before and after a plan."""
    parameters, stored, padding = layout.parameters, layout.checkpoint.total_bytes, 0
    planned = {layer.name: layer for layer in (*plan.layers, *plan.mtp_layers)}
    for block in (*layout.layers, *layout.mtp_layers):
        choice = planned.get(block.name)
        if choice is None:
            continue
        parameters -= sum(block.expert_parameters[expert] for expert in choice.drop)
        stored -= sum(block.expert_bytes[expert] for expert in choice.drop)
        empty = plan.n_after - len(choice.keep) if plan.export == "pad" else 0
        if empty > 0 and choice.keep:
            padding += empty * block.expert_parameters[choice.keep[0]]
            stored += empty * block.expert_bytes[choice.keep[0]]
    if plan.mtp == "drop":
        section = quantization_section(layout.checkpoint.config)
        gone = [layout.checkpoint.tensors[name] for name in layout.mtp_tensors]
        parameters -= sum(parameter_count(tensor, section) for tensor in gone)
        stored -= sum(tensor.nbytes for tensor in gone)
    return Amounts(layout.parameters, parameters + padding, parameters, layout.checkpoint.total_bytes, stored)


def finish_plan(plan: Plan, layout: Layout, limits: Constraints) -> Plan:
    """Fill in sizes and warnings."""
    measured = replace(plan, amounts=measure(layout, plan))
    return replace(measured, warnings=plan_warnings(measured, layout, limits))


def plan_layer(block: MoELayer, keep: Kept) -> PlanLayer:
    """Describe what a block keeps and drops."""
    kept = set(keep)
    drop = tuple(expert for expert in range(block.num_experts) if expert not in kept)
    return PlanLayer(block.name, block.layer, tuple(keep), drop)


def no_padding(layout: Layout) -> str:
    """Why slots of this family cannot be padded."""
    if layout.family.selection_bias:
        return (
            f"routers of {layout.model_type} weigh all logits against each other, so an empty slot changes the choice"
        )
    return f"routers of {layout.model_type} have no selection bias, so an empty slot cannot be disabled exactly"


def _check_stored_count(plan: Plan, limits: Constraints) -> None:
    if plan.export != "pad" or plan.n_after != limits.num_experts:
        check_count(plan.n_after, limits)


def _check_layer(layer: PlanLayer, plan: Plan, limits: Constraints, *, padded: bool) -> None:
    groups = [sum(limits.group_of(e) == g for e in layer.keep) for g in range(limits.n_group)]
    if len(layer.keep) < limits.smallest_count or min(groups) < limits.smallest_group:
        raise ConstraintError(
            f"{layer.name} keeps {len(layer.keep)} experts; at least {limits.smallest_count} must stay"
            + (f", {limits.smallest_group} in each of {limits.n_group} groups" if limits.n_group > 1 else "")
        )
    if plan.export == "plan-only":
        return
    slots = plan.n_after // limits.n_group
    if any(group > slots if padded else group != slots for group in groups):
        raise ConstraintError(
            f"{layer.name} keeps {len(layer.keep)} experts, but n_after is {plan.n_after}"
            + (f" in {limits.n_group} groups and it keeps {groups} per group" if limits.n_group > 1 else ""),
            "keep the same number in every layer and group, or correct n_after",
        )
