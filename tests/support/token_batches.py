"""Calibration batches from token tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from xmac_cli.data.calibration import TokenBatch, token_sha256


def token_batch(input_ids: Tensor, lengths: list[int] | None = None) -> TokenBatch:
    """A batch of token ids [B, S]; row b keeps its first lengths[b] tokens, the rest is padding."""
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    for row, length in enumerate(lengths or []):
        mask[row, length:] = False
    return TokenBatch(input_ids, mask, token_sha256(input_ids, mask), ())
