"""The shape of a mixture of experts: layers, experts per layer, and parameters used per token.

Counted from tensor names and shapes; the config is only asked for top-k, and for the count where experts are stored in
one tensor whose first axis is not the expert (DBRX). Active parameters = all - routed + routed * top_k / experts, per
layer; layers that only draft further tokens are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xmac_cli.checkpoint.header import TensorInfo
from xmac_cli.inspect_checkpoint.family import Family
from xmac_cli.inspect_checkpoint.parts import ExpertPlace, layer_number


@dataclass(frozen=True)
class MoeLayer:
    """One block with routed experts.

    Args:
        block: its name.
        layer: number of the layer, or None.
        experts: number of routed experts.
        parameters: of all routed experts together.
        fused: whether one tensor holds all experts.
        gaps: expert numbers that are missing below the highest one.
    """

    block: str
    layer: int | None
    experts: int
    parameters: int
    fused: bool
    gaps: tuple[int, ...]


@dataclass(frozen=True)
class MoeShape:
    """All MoE layers of the main model.

    Args:
        layers: in order.
        top_k: routed experts used per token, as in Family.
        total_parameters: of the checkpoint, without next-token layers.
        active_parameters: used for one token; None when top-k is unknown.
    """

    layers: tuple[MoeLayer, ...]
    top_k: int | tuple[int, ...] | None
    total_parameters: int
    active_parameters: int | None

    @property
    def experts_per_layer(self) -> tuple[int, ...]:
        """Distinct counts, ascending; one number when all layers are alike."""
        return tuple(sorted({layer.experts for layer in self.layers}))


def moe_shape(
    tensors: Mapping[str, TensorInfo],
    places: Mapping[str, ExpertPlace | None],
    parameters: Mapping[str, int],
    parts: Mapping[str, str],
    family: Family,
) -> MoeShape | None:
    """Return the shape of the mixture, or None for a dense model.

    Args:
        tensors: all tensors.
        places: what `expert_place` says of each.
        parameters: parameters that each tensor stands for.
        parts: part of each tensor.
        family: from the config.
    """
    blocks: dict[str, list[TensorInfo]] = {}
    for name, info in tensors.items():
        place = places[name]
        if place is not None and parts[name] == "routed experts":
            blocks.setdefault(place.block, []).append(info)
    if not blocks:
        return None
    layers = [_layer(block, infos, places, parameters, family) for block, infos in blocks.items()]
    layers.sort(key=lambda layer: (-1 if layer.layer is None else layer.layer, layer.block))
    total = sum(count for name, count in parameters.items() if parts[name] != "next-token layers")
    return MoeShape(tuple(layers), family.top_k, total, _active(total, layers, family))


def _layer(
    block: str,
    infos: Sequence[TensorInfo],
    places: Mapping[str, ExpertPlace | None],
    parameters: Mapping[str, int],
    family: Family,
) -> MoeLayer:
    found = (places[info.name] for info in infos)
    numbered = sorted({place.expert for place in found if place is not None and place.expert is not None})
    if numbered:
        experts = len(numbered)
        gaps = tuple(sorted(set(range(numbered[-1])) - set(numbered)))
    else:
        # DBRX flattens [experts, width, hidden] to two axes; everywhere else the first axis is the expert.
        stacked = [info.shape[0] for info in infos if len(info.shape) >= 3]
        experts = max(stacked) if stacked else family.num_experts or 0
        gaps = ()
    total = sum(parameters[info.name] for info in infos)
    return MoeLayer(block, layer_number(block), experts, total, not numbered, gaps)


def _active(total: int, layers: Sequence[MoeLayer], family: Family) -> int | None:
    if family.top_k is None:
        return None
    active = total
    for place, layer in enumerate(layers):
        top_k = family.top_k if isinstance(family.top_k, int) else _top_k_of(family.top_k, layer, place)
        if layer.experts:
            active -= layer.parameters - layer.parameters * min(top_k, layer.experts) // layer.experts
    return active


def _top_k_of(top_k: tuple[int, ...], layer: MoeLayer, place: int) -> int:
    """Look up a per-layer top-k, which counts all layers or only the MoE layers."""
    number = place if layer.layer is None or layer.layer >= len(top_k) else layer.layer
    return top_k[min(number, len(top_k) - 1)]
