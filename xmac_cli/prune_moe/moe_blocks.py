"""Find the mixture-of-experts blocks of a live transformers model.

A block is any module that owns `experts` (all routed experts, fused) and a router called `gate` or `router`; this is
how transformers 5 builds every family that prune-moe supports. What the structure cannot tell stands in the small
tables below. Shapes: n routed experts, top-k of them act on a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from xmac_cli.cli.errors import UnsupportedModelError
from xmac_cli.prune_moe.families import REFUSED, TOP_K_KEYS, find_family

# Block classes in which a gate multiplies the *input* of its expert, and experts are called without gates.
_GATE_ON_INPUT = frozenset({"Llama4TextMoe"})
# Block classes that multiply the routed output by a constant of the block, after the experts have been added up.
_OUTPUT_SCALE = {
    "LagunaSparseMoeBlock": "routed_scaling_factor",
    "Step3p7SparseMoeBlock": "routed_scaling_factor",
}
# Block classes that apply a linear map to the sum of the gated expert outputs.
_OUTPUT_PROJECTION = {"NemotronHMoE": "fc2_latent_proj"}

_LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class MoEModule:
    """One mixture-of-experts block of a live model.

    Args:
        name: module path of the block, as in `model.named_modules()`.
        layer: index of the decoder layer that holds the block.
        model_type: of the model or of its language model, whichever families.py knows.
        block: the block; also holds shared experts, which are never players.
        router: computes router logits, picks top-k ids and gates.
        experts: holds the weights of all routed experts.
        num_experts: n.
        top_k: k.
        num_groups: contiguous groups the router limits its choice to; 1 = no groups.
        topk_groups: groups a token may use.
        gate_on_input: the gate multiplies the expert's input instead of its output (Llama 4).
        output_scale: constant factor on the routed output.
        output_projection: linear map between the gated sum and the block's output, or None.
    """

    name: str
    layer: int
    model_type: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    gate_on_input: bool = False
    output_scale: float = 1.0
    output_projection: nn.Module | None = None


def moe_modules(model: nn.Module) -> list[MoEModule]:
    """List the mixture-of-experts blocks of a model in layer order.

    Returns:
        One entry per block; next-token-prediction (MTP) layers are not part of a transformers model and never appear.

    Raises:
        UnsupportedModelError: a family on the refusal list, a block whose parts do not fit together, or no block.
    """
    for model_type in _model_types(model):
        if model_type in REFUSED:
            raise UnsupportedModelError(
                f"experts of `{model_type}` models cannot be pruned: {REFUSED[model_type]}",
                hint="add a rule and a test for this family before using it",
            )
    found = [
        _describe(name, block, _router(block), model)
        for name, block in model.named_modules()
        if isinstance(getattr(block, "experts", None), nn.Module) and _router(block) is not None
    ]
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no mixture-of-experts block with a router and fused experts",
            hint="prune-moe needs a model whose blocks own `experts` and `gate` or `router`",
        )
    return sorted(found, key=lambda entry: entry.layer)


def _model_types(model: nn.Module) -> list[str]:
    config = getattr(model, "config", None)
    found = (getattr(holder, "model_type", None) for holder in (config, getattr(config, "text_config", None)))
    return [str(model_type) for model_type in found if model_type]


def _family_type(model: nn.Module) -> str:
    types = _model_types(model)
    return next((name for name in types if find_family(name) is not None), types[-1] if types else "unknown")


def _router(block: nn.Module) -> nn.Module | None:
    for name in ("gate", "router"):
        child = getattr(block, name, None)
        if isinstance(child, nn.Module):
            return child
    return None


def _describe(name: str, block: nn.Module, router: nn.Module | None, model: nn.Module) -> MoEModule:
    if router is None:
        raise UnsupportedModelError(f"{name} has experts but no router")
    match = _LAYER_INDEX.search(name)
    rows = _router_rows(router)
    if match is None or rows is None:
        raise UnsupportedModelError(f"{name} ({type(block).__name__}) has a router whose size cannot be read")
    experts = block.experts
    declared = getattr(experts, "num_experts", rows)
    if not isinstance(experts, nn.Module) or isinstance(experts, nn.ModuleList) or declared != rows:
        raise UnsupportedModelError(
            f"{name} ({type(block).__name__}) routes to {rows} experts but holds {declared}",
            hint="load the model with a transformers release that has its class, without remote code",
        )
    groups = int(_first(router, ("num_group", "n_group")) or 1)
    return MoEModule(
        name=name,
        layer=int(match.group(1)),
        model_type=_family_type(model),
        block=block,
        router=router,
        experts=experts,
        num_experts=rows,
        top_k=_top_k(name, block, router, model),
        num_groups=groups if _uses_groups(router) else 1,
        topk_groups=int(_first(router, ("topk_group",)) or 1) if _uses_groups(router) else 1,
        gate_on_input=type(block).__name__ in _GATE_ON_INPUT,
        output_scale=float(getattr(block, _OUTPUT_SCALE.get(type(block).__name__, ""), 1.0)),
        output_projection=getattr(block, _OUTPUT_PROJECTION.get(type(block).__name__, ""), None),
    )


def _uses_groups(router: nn.Module) -> bool:
    # DeepSeek-V2 carries n_group in its config even when it routes greedily.
    return getattr(router, "topk_method", "grouped") != "greedy"


def _first(module: nn.Module, names: tuple[str, ...]) -> Any:
    return next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)


def _router_rows(router: nn.Module) -> int | None:
    weight = getattr(router, "weight", None)
    if weight is not None and weight.dim() == 2:
        return int(weight.shape[0])
    linears = [child for child in router.children() if isinstance(child, nn.Linear)]
    return int(linears[0].out_features) if len(linears) == 1 else None


def _top_k(name: str, block: nn.Module, router: nn.Module, model: nn.Module) -> int:
    for holder in (router, block):
        if isinstance(getattr(holder, "top_k", None), int):
            return int(holder.top_k)  # type: ignore[arg-type]
    config = getattr(model, "config", None)
    text_config = getattr(config, "text_config", config)
    for key in TOP_K_KEYS:
        if isinstance(getattr(text_config, key, None), int):
            return int(getattr(text_config, key))
    raise UnsupportedModelError(f"the number of experts per token of {name} cannot be read")
