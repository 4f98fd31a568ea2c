"""CPU path: one compiled loop over tokens and coalitions.

A token's Gram matrix stays in cache while all B coalitions are evaluated on it. Tokens are split into fixed chunks and
the partial sums are added in order, so that the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit
from torch import Tensor

from xmac_kernels.coalition.op import CoalitionTable

_CHUNK = 256
_MODES = {"topk": 0, "survivors": 1, "none": 2}


@njit(cache=True, nogil=True, error_model="numpy")
def _residual(order, weight, gram, full, masks, mode, scale, epsilon, out):  # type: ignore[no-untyped-def]
    """order, weight [t, n] (best choice first), gram [t, n, n], full [t, k], masks [B, n] -> adds to out [B]."""
    tokens, n = order.shape
    k = full.shape[1]
    ids = np.empty(2 * k, np.int64)
    c = np.empty(2 * k, np.float64)
    where = np.empty(k, np.int64)
    numerator = np.empty(k, np.float64)
    for t in range(tokens):
        for b in range(masks.shape[0]):
            intact = mode != 1
            for s in range(k):
                ids[s] = order[t, s]
                c[s] = -full[t, s]
                intact = intact and masks[b, ids[s]]
            if intact:
                continue
            count = 0
            total = 0.0
            for j in range(n):
                if masks[b, order[t, j]]:
                    if count < k:
                        where[count] = j
                        numerator[count] = weight[t, j]
                        count += 1
                        if mode == 0:
                            total += weight[t, j]
                    elif mode != 1:
                        break
                    if mode == 1:
                        total += weight[t, j]
            factor = scale
            if mode != 2:
                factor = scale / (total + epsilon) if total + epsilon > 0 else 0.0
            used = k
            for s in range(count):
                # `order` starts with the full model's choice, so position j < k is already in the list.
                if where[s] < k:
                    c[where[s]] += factor * numerator[s]
                else:
                    ids[used] = order[t, where[s]]
                    c[used] = factor * numerator[s]
                    used += 1
            value = 0.0
            for p in range(used):
                row = 0.0
                for q in range(p):
                    row += c[q] * gram[t, ids[p], ids[q]]
                value += c[p] * (2.0 * row + c[p] * gram[t, ids[p], ids[p]])
            out[b] += value


def residual(table: CoalitionTable, masks: Tensor) -> Tensor:
    """float64 [B], see `coalition_residual`; uses as many threads as torch does."""
    present = masks.numpy()
    arrays = (
        table.order.numpy(),
        table.ordered_weight.double().numpy(),
        table.gram.detach().contiguous().numpy(),
        table.full_gates.numpy(),
    )
    mode = _MODES[table.denominator]

    def chunk_sum(start: int) -> np.ndarray:
        out = np.zeros(present.shape[0])
        order, weight, gram, full = (array[start : start + _CHUNK] for array in arrays)
        _residual(order, weight, gram, full, present, mode, table.scale, table.epsilon, out)
        return out

    total = np.zeros(present.shape[0])
    for part in _map(chunk_sum, range(0, table.tokens, _CHUNK)):
        total += part
    return torch.from_numpy(total)


def _map(function, starts: range) -> Iterator[np.ndarray]:  # type: ignore[no-untyped-def]
    threads = min(torch.get_num_threads(), len(starts))
    if threads <= 1:
        yield from map(function, starts)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(function, starts)
