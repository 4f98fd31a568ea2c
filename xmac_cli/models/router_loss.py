"""Load balancing of routed experts, per layer (Fedus et al., Switch Transformers, arXiv 2101.03961, eq. 4-6).

L = E * sum_e f_e P_e with f_e = share of tokens whose top-k holds expert e (sums to k) and P_e = mean router
probability; it is k when both are even. transformers computes one such term over all layers together, where an expert
id overused in one layer may hide behind the same id in another; here every layer has its own term.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def load_balancing_loss(router_logits: Sequence[torch.Tensor], top_k: int) -> torch.Tensor:
    """Mean over layers of the balance term.

    Args:
        router_logits: per layer [T, E], real tokens only.
        top_k: experts per token.

    Returns:
        scalar; top_k when balanced, up to E when one set of experts takes everything.
    """
    terms = []
    for logits in router_logits:
        experts = logits.shape[-1]
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        chosen = probabilities.topk(top_k, dim=-1).indices
        frequency = torch.bincount(chosen.reshape(-1), minlength=experts).float() / len(logits)
        terms.append(experts * (frequency * probabilities.mean(dim=0)).sum())
    return torch.stack(terms).mean()
