"""`--dry-run`: what pruning would change and cost, read from headers and config alone.

Scoring cost: about M * N * f forward passes for Shapley values (M permutations, N players, f = 0.4 of each permutation
evaluated when it is truncated at tau > 0, from the run times in the paper), 2 * A * T operations a pass (A = parameters
that act on one token, T = calibration tokens).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmac_cli.prune_moe.families import MTP_COUNT_KEYS, config_value
from xmac_cli.prune_moe.layout import Layout
from xmac_cli.prune_moe.options import STATISTIC_CRITERIA
from xmac_cli.prune_moe.plan_file import Plan
from xmac_cli.prune_moe.pruned_config import changed_keys, pruned_config
from xmac_cli.prune_moe.shapley import EXPECTED_EVALUATED_SHARE
from xmac_cli.prune_moe.surgery import planned_shards
from xmac_cli.report.schema import Report, Table

_GIB = 2**30
_MANY = 10**15  # subsets; enough to see that it cannot be done
_APPLY_MEMORY = 64 << 20


@dataclass(frozen=True)
class Scoring:
    """How scores would be obtained.

    Args:
        criterion: as in `--criterion`.
        value: value of a coalition, for Shapley: "ppl", "nll", "kl" or "recon".
        permutations: M.
        truncate: tau.
        tokens: T, calibration tokens.
    """

    criterion: str = "shapley"
    value: str = "recon"
    permutations: int = 20
    truncate: float = 0.5
    tokens: int = 16 * 512


def active_parameters(layout: Layout) -> int:
    """Parameters that act on one token: everything but the routed experts, and top-k of those."""
    experts = sum(sum(layer.expert_parameters) for layer in layout.layers)
    unused = sum(sum(layer.expert_parameters) for layer in layout.mtp_layers)
    return round(layout.parameters - unused - experts * (1 - layout.top_k / layout.num_experts))


def scoring_cost(layout: Layout, scoring: Scoring, n_after: int) -> dict[str, Any]:
    """Forward passes, coalition evaluations and floating point operations of scoring.

    Returns:
        {"passes", "coalitions", "flops", "memory_bytes"}: whole forward passes; evaluations of a coalition; operations
        of both together; the weights and, for reconstruction, one layer's expert outputs in float32.
    """
    players = layout.num_experts * len(layout.layers)
    share = EXPECTED_EVALUATED_SHARE if scoring.truncate > 0 else 1.0
    one_pass = 2 * active_parameters(layout) * scoring.tokens
    width = int(config_value(layout.checkpoint.config, ("hidden_size", "d_model")) or 0)
    outputs = 2 * scoring.tokens * sum(sum(layer.expert_parameters) for layer in layout.layers)
    combine = 2 * scoring.tokens * layout.top_k * width
    cost = {"passes": 0.0, "coalitions": 0.0, "flops": 0.0, "memory_bytes": float(layout.checkpoint.total_bytes)}
    if scoring.criterion in STATISTIC_CRITERIA:
        cost |= {"passes": 1, "flops": one_pass}
    elif scoring.criterion == "shapley" and scoring.value != "recon":
        passes = scoring.permutations * players * share
        cost |= {"passes": passes, "coalitions": passes, "flops": passes * one_pass}
    elif scoring.criterion == "loo":
        cost |= {"passes": players + 1, "coalitions": players, "flops": (players + 1) * one_pass}
    elif scoring.criterion in ("shapley", "greedy", "naee"):
        coalitions = {
            "shapley": scoring.permutations * players * share,
            "greedy": len(layout.layers) * sum(range(n_after + 1, layout.num_experts + 1)),
            "naee": len(layout.layers) * min(math.comb(layout.num_experts, n_after), _MANY),
        }[scoring.criterion]
        cost |= {"passes": 1, "coalitions": coalitions, "flops": one_pass + outputs + coalitions * combine}
        cost["memory_bytes"] += 4 * scoring.tokens * layout.num_experts * width
    return cost


def dry_run(layout: Layout, plan: Plan, scoring: Scoring | None = None) -> Report:
    """Describe what would happen.

    Args:
        layout: of the checkpoint.
        plan: a real plan, or one made with `placeholder_scores` and `headers_only` when there are no scores yet.
        scoring: how scores would be obtained; None when the plan comes from a file.
    """
    unpadded = replace(plan, export="plain") if plan.export == "plan-only" else plan
    shards, counts = planned_shards(layout, unpadded, zeros=Path(os.devnull))
    before, after = Counter[str](), Counter[str]()
    for tensor in layout.checkpoint.tensors.values():
        before[tensor.dtype] += tensor.nbytes
    for shard in shards:
        for planned in shard.tensors:
            after[planned.dtype] += planned.nbytes
    config = layout.checkpoint.config
    changes = changed_keys(config, pruned_config(config, layout, plan))
    output = sum(shard.size for shard in shards if shard.tensors)
    result: dict[str, Any] = {
        "family": layout.family.name,
        "model_type": layout.model_type,
        "layout": layout.storage,
        "moe_layers": [layer.layer for layer in layout.layers],
        "experts": {"before": plan.n_before, "after": plan.n_after},
        "kept_per_layer": {str(layer.layer): len(layer.keep) for layer in plan.layers},
        "ratio": plan.actual_ratio,
        "allocation": plan.allocation,
        "export": plan.export,
        "top_k": layout.top_k,
        "groups": {"n_group": layout.n_group, "topk_group": layout.topk_group},
        "routing": layout.family.routing,
        "selection_bias": layout.family.selection_bias,
        "paddable": layout.family.paddable,
        "null_move_exact": layout.null_move_exact,
        "parameters": {
            "before": plan.amounts.parameters_before,
            "after": plan.amounts.parameters_after,
            "after_without_padding": plan.amounts.real_parameters,
            "active": active_parameters(layout),
        },
        "bytes_by_dtype": {"before": dict(sorted(before.items())), "after": dict(sorted(after.items()))},
        "mtp": _mtp(layout, plan),
        "config_changes": [{"key": key, "before": old, "after": new} for key, old, new in changes],
        "tensors": counts.__dict__,
        "scoring": scoring_cost(layout, scoring, plan.n_after) if scoring else None,
        "disk_bytes": output,
        "apply_memory_bytes": _APPLY_MEMORY,
    }
    return Report(result=result, tables=[_overview(result), _sizes(result)], warnings=plan.warnings)


def _mtp(layout: Layout, plan: Plan) -> dict[str, Any]:
    return {
        "policy": plan.mtp,
        "moe_layers": [layer.name for layer in layout.mtp_layers],
        "tensors": len(layout.mtp_tensors),
        "configured_layers": config_value(layout.checkpoint.config, MTP_COUNT_KEYS) or 0,
    }


def _overview(result: dict[str, Any]) -> Table:
    kept = Counter(result["kept_per_layer"].values())
    per_layer = ", ".join(f"{count} in {layers} layers" for count, layers in sorted(kept.items()))
    tensors, scoring, layers = result["tensors"], result["scoring"], result["moe_layers"]
    groups = result["groups"]
    rows: list[list[object]] = [
        ["family", f"{result['family']} (model type {result['model_type']})"],
        ["expert tensors", result["layout"]],
        ["MoE layers", f"{len(layers)} ({layers[0]} to {layers[-1]})"],
        ["experts per layer", f"{result['experts']['before']} → {result['experts']['after']}"],
        ["kept per layer", per_layer],
        ["removed", f"{result['ratio']:.1%}, allocation {result['allocation']}, export {result['export']}"],
        ["top-k", result["top_k"]],
        ["groups", f"{groups['n_group']}, {groups['topk_group']} per token" if groups["n_group"] > 1 else "none"],
        ["routing", result["routing"] + (", selection bias" if result["selection_bias"] else "")],
        ["next-token layers", f"{len(result['mtp']['moe_layers'])}, policy {result['mtp']['policy']}"],
        ["config keys", ", ".join(change["key"] for change in result["config_changes"]) or "none"],
        ["tensors", ", ".join(f"{count} {way}" for way, count in tensors.items() if count)],
        ["disk", f"{result['disk_bytes'] / _GIB:.2f} GiB"],
        ["memory to apply", f"about {result['apply_memory_bytes'] >> 20} MiB"],
    ]
    if scoring:
        work = f"{scoring['passes']:,.0f} passes, {scoring['coalitions']:,.0f} coalitions, {scoring['flops']:.2g} FLOP"
        rows.append(["scoring", work])
        rows.append(["memory to score", f"{scoring['memory_bytes'] / _GIB:.2f} GiB"])
    return Table("What prune-moe would do", ["", ""], rows, "Read from headers and config only.")


def _sizes(result: dict[str, Any]) -> Table:
    before, after = (result["bytes_by_dtype"][side] for side in ("before", "after"))
    parameters = result["parameters"]
    rows: list[list[object]] = [
        [f"{dtype}, GiB", round(size / _GIB, 3), round(after.get(dtype, 0) / _GIB, 3)] for dtype, size in before.items()
    ]
    rows.append(["all, GiB", round(sum(before.values()) / _GIB, 3), round(sum(after.values()) / _GIB, 3)])
    rows.append(["parameters, 10^9", round(parameters["before"] / 1e9, 3), round(parameters["after"] / 1e9, 3)])
    return Table("Size", ["", "before", "after"], rows)
