"""Random coalition tables of many shapes, shared by the tests of all backends."""

from __future__ import annotations

import torch
from xmac_kernels.coalition import CoalitionTable

# tokens, experts, top-k: sizes that are no multiple of a block, k = n, one token, one expert, more experts than a warp
SHAPES = [(33, 7, 3), (70, 8, 2), (5, 16, 1), (1, 8, 8), (2, 1, 1), (40, 64, 8), (3, 130, 6)]
DENOMINATORS = ("topk", "survivors", "none")


def random_table(
    tokens: int, n: int, k: int, denominator: str, *, seed: int = 0, ties: bool = False, epsilon: float = 1e-6
) -> CoalitionTable:
    """A table from random logits and random expert outputs of 12 channels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, n, generator=generator)
    if ties:
        logits = logits.round()
    outputs = torch.randn(tokens, n, 12, generator=generator, dtype=torch.float64)
    gram = torch.einsum("tid,tjd->tij", outputs, outputs).float()
    weight = torch.exp(logits - logits.max(dim=1, keepdim=True).values)
    return CoalitionTable(logits, weight, (gram + gram.mT) / 2, k, denominator, scale=1.3, epsilon=epsilon)  # type: ignore[arg-type]


def random_masks(n: int, *, count: int = 9, seed: int = 1) -> torch.Tensor:
    """Coalitions [count, n]; the first has everybody, the second nobody, the third one expert."""
    masks = torch.rand(count, n, generator=torch.Generator().manual_seed(seed)) < 0.5
    masks[0] = True
    masks[1:3] = False
    masks[2, n // 2] = True
    return masks


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest error relative to the largest residual."""
    return float((value.cpu() - reference).abs().max() / reference.abs().max().clamp(min=1e-30))
