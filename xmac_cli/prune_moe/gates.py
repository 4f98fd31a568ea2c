"""Gates of a router as a formula of its logits, so that coalitions can be evaluated without running the model.

Every softmax and sigmoid router of the supported families is one case of
    e_i = exp(l_i) or sigmoid(l_i),  choose the k best survivors by l_i or by score + bias,  g_i = scale * e_i / D,
where D sums e over the chosen experts (renormalised), over all survivors (plain softmax), or is 1. Group-limited
choice, a bias on softmax scores and p-norms have a formula too, but not the static ranking that the kernel needs.
Routers outside of the formula (sparsemixer, unknown families) return None here and are run as they are.
Shapes: T tokens, n experts, k chosen. Source: the routers of transformers 5; families.py names each family's case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from xmac_cli.prune_moe.families import find_family
from xmac_cli.prune_moe.moe_blocks import MoEModule

Denominator = Literal["topk", "survivors", "none"]


@dataclass(frozen=True)
class GateFormula:
    """One router.

    Args:
        score: "softmax" over survivors, "sigmoid", or "one" for routers whose gate already scaled the expert's input.
        top_k: k.
        denominator: see the module docstring.
        choose_by_logit: rank experts by logit; else by score + bias.
        bias: [n] selection bias, or None.
        scale: constant factor.
        epsilon: added to the denominator.
        minimum: smallest denominator.
        power: p of the p-norm that renormalises chosen gates.
        num_groups, topk_groups: group-limited choice; 1 = none.
        group_score: a group ranks by the sum of its "top2" or by its "max".
    """

    score: Literal["softmax", "sigmoid", "one"]
    top_k: int
    denominator: Denominator
    choose_by_logit: bool = True
    bias: Tensor | None = None
    scale: float = 1.0
    epsilon: float = 0.0
    minimum: float = 0.0
    power: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"

    @property
    def null_move_is_exact(self) -> bool:
        """Removing an expert that no token uses leaves every gate and every choice as it is.

        False when D runs over all survivors, when groups compete, and when a softmax over the survivors is added to a
        bias that is not the same for all experts: then a removal lifts all other probabilities against their biases.
        """
        drifting = self.score == "softmax" and not self.choose_by_logit
        return self.denominator != "survivors" and self.num_groups == 1 and not drifting


@dataclass(frozen=True)
class RankedGates:
    """Gates with a ranking that does not depend on the coalition, as `xmac_kernels.coalition` wants them.

    Args:
        choice: [T, n] ranking score.
        weight: float64 [T, n] numerators e.
    """

    choice: Tensor
    weight: Tensor


def gate_formula(entry: MoEModule) -> GateFormula | None:
    """The formula of a block's router, or None when its family has none."""
    family = find_family(entry.model_type)
    if family is None or family.routing == "sparsemixer":
        return None
    k, router = entry.top_k, entry.router
    if entry.gate_on_input:
        return GateFormula("one", k, "none")
    renormalise = _renormalise(entry, family.renormalise)
    if family.routing == "topk_softmax" and getattr(router, "expert_selection_fn", "softmax") == "softmax":
        return GateFormula("softmax", k, "topk")
    if family.routing in ("topk_softmax", "topk_sigmoid"):
        return GateFormula("sigmoid", k, "topk" if renormalise else "none")
    bias = _selection_bias(entry)
    scale = float(
        next((getattr(router, name) for name in _SCALES if isinstance(getattr(router, name, None), float | int)), 1.0)
    )
    num_groups, topk_groups = entry.num_groups, entry.topk_groups
    if family.routing == "sigmoid":
        return GateFormula(
            "sigmoid",
            k,
            "topk" if renormalise else "none",
            choose_by_logit=bias is None,
            bias=bias,
            scale=scale,
            epsilon=1e-6 if entry.model_type == "lfm2_moe" and renormalise else 0.0,
            num_groups=num_groups,
            topk_groups=topk_groups,
        )
    return GateFormula(
        "softmax",
        k,
        "topk" if renormalise else "survivors",
        choose_by_logit=bias is None or bool((bias == bias[0]).all()),
        bias=bias,
        scale=scale,
        minimum=float(getattr(router, "norm_min", 0.0)),
        power=_power(entry),
        group_score="max" if family.grouped == "max" else "top2",
        num_groups=num_groups,
        topk_groups=topk_groups,
    )


_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")


def _renormalise(entry: MoEModule, rule: str) -> bool:
    if rule in ("always", "never"):
        return rule == "always"
    # DBRX says None for "do not renormalise"; elsewhere a router without the flag always renormalises.
    missing = None if hasattr(entry.block, rule) else True
    return bool(getattr(entry.router, "norm_topk_prob", getattr(entry.block, rule, missing)))


def _power(entry: MoEModule) -> float:
    return float(getattr(entry.block, "moe_normalize_expert_weights", None) or 1.0)


def _selection_bias(entry: MoEModule) -> Tensor | None:
    for holder in (entry.router, getattr(entry.router, "moe_statics", None), entry.block):
        for name in ("e_score_correction_bias", "expert_bias"):
            bias = getattr(holder, name, None)
            if isinstance(bias, Tensor) and getattr(entry.router, "use_expert_bias", True):
                return bias.detach().reshape(-1)
    return None


def masked_gates(formula: GateFormula, logits: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Choice and gates of every token when only some experts are present.

    Args:
        formula: the router.
        logits: [T, n] router logits of all experts.
        present: bool [n].

    Returns:
        (index int64 [T, k], gates float64 [T, k]); the gate is 0 where fewer than k experts were available.
    """
    logits = logits.double().masked_fill(~present, -torch.inf)
    if formula.score == "softmax":
        score = torch.softmax(logits, dim=1).nan_to_num(0.0)
    else:
        score = torch.sigmoid(logits) if formula.score == "sigmoid" else present.double().expand_as(logits)
    choice = logits if formula.choose_by_logit else score
    if formula.bias is not None and not formula.choose_by_logit:
        choice = choice + formula.bias.double()
    choice = _limit_groups(formula, choice.masked_fill(~present, -torch.inf))
    index = torch.argsort(choice, dim=1, descending=True, stable=True)[:, : formula.top_k]
    chosen = score.gather(1, index).masked_fill(choice.gather(1, index) == -torch.inf, 0.0)
    if formula.denominator == "topk":
        norm = (chosen**formula.power).sum(dim=1, keepdim=True) ** (1 / formula.power) + formula.epsilon
        norm = norm.clamp(min=formula.minimum)
        chosen = torch.where(norm > 0, chosen / norm, 0.0)
    return index, formula.scale * chosen


def _limit_groups(formula: GateFormula, choice: Tensor) -> Tensor:
    if formula.num_groups == 1:
        return choice
    grouped = choice.view(choice.shape[0], formula.num_groups, -1)
    best = grouped.topk(1 if formula.group_score == "max" else min(2, grouped.shape[2]), dim=2).values
    empty = (best == -torch.inf).all(dim=2)
    score = best.masked_fill(best == -torch.inf, 0.0).sum(dim=2).masked_fill(empty, -torch.inf)
    allowed = torch.zeros_like(score, dtype=torch.bool).scatter_(
        1, score.topk(formula.topk_groups, dim=1).indices, True
    )
    return grouped.masked_fill(~allowed[:, :, None], -torch.inf).reshape(choice.shape)


def ranked_gates(formula: GateFormula, logits: Tensor) -> RankedGates | None:
    """The kernel's form of a router, or None when its ranking depends on the coalition."""
    drifting = formula.score == "softmax" and not formula.choose_by_logit
    if formula.num_groups > 1 or formula.power != 1 or drifting:
        return None
    logits64 = logits.double()
    if formula.score == "softmax":
        weight = torch.exp(logits64 - logits64.max(dim=1, keepdim=True).values)
    else:
        weight = torch.sigmoid(logits64) if formula.score == "sigmoid" else torch.ones_like(logits64)
    if formula.choose_by_logit or formula.bias is None:
        return RankedGates(logits, weight)
    # The router adds score and bias in float32; ranking by the same sum breaks near-ties the same way.
    return RankedGates(torch.sigmoid(logits.float()) + formula.bias.float(), weight)
