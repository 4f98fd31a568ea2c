"""Plain torch on any device: dense gate differences and batched matrix products, in chunks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from xmac_kernels.coalition.op import CoalitionTable

# Elements of the largest temporary, c * G [B, chunk, n].
_CHUNK_ELEMENTS = 1 << 22


def residual(table: CoalitionTable, masks: Tensor) -> Tensor:
    """float64 [B], see `coalition_residual`."""
    total = torch.zeros(masks.shape[0], dtype=torch.float64, device=masks.device)
    chunk = max(1, _CHUNK_ELEMENTS // (masks.shape[0] * table.num_experts))
    for start in range(0, table.tokens, chunk):
        part = slice(start, start + chunk)
        c = _gate_difference(table, masks, part).transpose(0, 1).contiguous()  # [chunk, B, n]
        total += (torch.bmm(c, table.gram[part].double()) * c).sum(dim=(0, 2))
    return total


def _gate_difference(table: CoalitionTable, masks: Tensor, part: slice) -> Tensor:
    """g_S - g_N, float64 [B, chunk, n]."""
    order = table.order[part].long()
    present = masks[:, order]  # [B, chunk, n], best choice first
    chosen = present & (present.cumsum(dim=2) <= table.top_k)
    weight = table.ordered_weight[part].double() * chosen
    if table.denominator == "none":
        gates = table.scale * weight
    else:
        summed = weight if table.denominator == "topk" else table.ordered_weight[part].double() * present
        total = summed.sum(dim=2, keepdim=True) + table.epsilon
        gates = torch.where(total > 0, table.scale * weight / total, 0.0)
    gates[:, :, : table.top_k] -= table.full_gates[part]
    return torch.zeros_like(gates).scatter_(2, order.expand_as(gates), gates)
