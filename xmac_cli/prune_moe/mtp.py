"""Which experts of a next-token-prediction (MTP) layer stay: a ranking without data.

transformers does not run these layers, so they cannot be scored, but vLLM, SGLang and MLX build them with the same
number of experts. The main model verifies what they predict, so a poor choice costs speed and never correctness.
Rule (ours): with a selection bias the experts with the largest bias go, because load balancing raises the bias of
experts that are seldom used; without one the experts with the shortest router row go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xmac_cli.checkpoint.tensors import read_tensor
from xmac_cli.cli.errors import ConstraintError, UnsupportedModelError
from xmac_cli.prune_moe.allocation import Constraints, keep_best
from xmac_cli.prune_moe.layout import Layout, MoELayer
from xmac_cli.prune_moe.plan_file import PlanLayer

if TYPE_CHECKING:
    import numpy as np


def data_free_scores(layout: Layout, layer: MoELayer) -> np.ndarray:
    """Scores of a next-token layer's experts from its router alone.

    Returns:
        float64 [E], higher = keep.

    Raises:
        UnsupportedModelError: the router is stored in a way that cannot be read as numbers.
    """
    import torch

    for role in ("bias", "router"):
        names = [name for name, claim in layer.claims.items() if claim.role == role]
        if not names:
            continue
        axis = layer.claims[names[0]].axis
        tensor = read_tensor(layout.checkpoint.tensors[names[0]])
        if not tensor.is_floating_point():
            raise UnsupportedModelError(
                f"{names[0]} is stored as {tensor.dtype}, so the next-token layer cannot be ranked", "use --mtp drop"
            )
        rows = tensor.to(torch.float64).movedim(axis, 0).reshape(layer.num_experts, -1)
        scores = -rows[:, 0] if role == "bias" else rows.norm(dim=1)
        return scores.numpy()
    raise UnsupportedModelError(f"{layer.name} has no router that could rank its experts", "use --mtp drop")


def plan_mtp_layers(layout: Layout, count: int, limits: Constraints) -> tuple[PlanLayer, ...]:
    """Cut every next-token layer to `count` experts.

    Raises:
        ConstraintError: a next-token layer has another number of experts than the decoder.
    """
    planned = []
    for layer in layout.mtp_layers:
        if layer.num_experts != layout.num_experts:
            raise ConstraintError(
                f"next-token layer {layer.name} has {layer.num_experts} experts, the decoder {layout.num_experts}",
                "use --mtp drop or --mtp keep",
            )
        keep = keep_best(data_free_scores(layout, layer), count, limits)
        drop = tuple(expert for expert in range(layer.num_experts) if expert not in set(keep))
        planned.append(PlanLayer(layer.name, layer.layer, keep, drop))
    return tuple(planned)
