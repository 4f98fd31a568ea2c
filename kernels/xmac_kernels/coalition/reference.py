"""The definition in float64, one coalition and one token at a time. Never dispatched; tests compare with it."""

from __future__ import annotations

import torch
from torch import Tensor

from xmac_kernels.coalition.op import CoalitionTable


def gates(table: CoalitionTable, mask: Tensor) -> Tensor:
    """Gates of one coalition, float64 [T, n], zero for experts that are absent or not chosen."""
    result = torch.zeros(table.choice.shape, dtype=torch.float64)
    survivors = [i for i in range(table.num_experts) if bool(mask[i])]
    for t in range(table.tokens):
        ranked = sorted(survivors, key=lambda i: (-float(table.choice[t, i]), i))
        chosen = ranked[: table.top_k]
        summed = {"topk": chosen, "survivors": survivors, "none": []}[table.denominator]
        total = sum(float(table.weight[t, i]) for i in summed) + table.epsilon
        if table.denominator == "none":
            total = 1.0
        for i in chosen:
            result[t, i] = table.scale * float(table.weight[t, i]) / total if total > 0 else 0.0
    return result


def residual(table: CoalitionTable, masks: Tensor) -> Tensor:
    """float64 [B], see `coalition_residual`."""
    full = gates(table, torch.ones(table.num_experts, dtype=torch.bool))
    gram = table.gram.double().cpu()
    values = []
    for mask in masks.cpu():
        c = gates(table, mask) - full
        values.append(torch.einsum("ti,tij,tj->", c, gram, c))
    return torch.stack(values)
