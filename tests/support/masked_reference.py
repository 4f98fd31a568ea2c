"""A reference for masked routing that knows nothing of transformers' router classes.

It watches the matrix product with the router weight and writes -inf into the columns of absent experts, and it writes
-inf into their selection biases. Nothing of the package under test is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BLOCK = r"\.(\d+)\.(?:mlp|feed_forward|block_sparse_moe|mixer|ffn)\."
_ROUTER_WEIGHT = re.compile(_BLOCK + r"(?:gate|router)(?:\.gate|\.wg|\.layer)?\.weight$")
_SELECTION_BIAS = re.compile(_BLOCK + r"[\w.]*(?:e_score_correction_bias|expert_bias|router\.bias)$")


def router_weights(model: Any) -> dict[int, list[torch.Tensor]]:
    """Router weights [E, d] of the live model by decoder layer."""
    return _by_layer(model, _ROUTER_WEIGHT)


def selection_biases(model: Any) -> dict[int, list[torch.Tensor]]:
    """Selection biases [E] or [1, E] of the live model by decoder layer; empty for routers without one."""
    return _by_layer(model, _SELECTION_BIAS)


def _by_layer(model: Any, pattern: re.Pattern[str]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        match = pattern.search(name)
        if match:
            found.setdefault(int(match[1]), []).append(tensor)
    return found


class _MaskRouterProducts(TorchFunctionMode):
    """Writes -inf into the router logits of absent experts wherever the router weight is multiplied."""

    _PRODUCTS = frozenset({"linear", "matmul", "mm", "addmm", "__matmul__"})
    _CASTS = frozenset({"float", "to", "type", "double"})

    def __init__(self, absent: dict[int, list[int]]) -> None:
        super().__init__()
        self._absent = dict(absent)
        self._alive: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in self._PRODUCTS or name in self._CASTS:
            tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
            hits = [self._absent[t.data_ptr()] for t in tensors if t.data_ptr() in self._absent]
            if hits and name in self._PRODUCTS:
                result = result.clone()
                result[..., hits[0]] = float("-inf")
            elif hits and result.data_ptr() not in self._absent:
                self._absent[result.data_ptr()] = hits[0]
                self._alive.append(result)
        return result


@contextmanager
def reference_masking(model: Any, kept: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """While active, the model routes as if only the kept experts existed.

    Args:
        model: a live transformers model.
        kept: expert ids that stay, by decoder layer; layers not named keep all experts.
    """
    absent: dict[int, list[int]] = {}
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    weights, biases = router_weights(model), selection_biases(model)
    for layer, ids in kept.items():
        for weight in weights[layer]:
            dropped = [e for e in range(weight.shape[0]) if e not in set(ids)]
            absent[weight.data_ptr()] = dropped
            for bias in biases.get(layer, ()):
                saved.append((bias, bias.detach().clone()))
                bias.data[..., dropped] = float("-inf")
    try:
        with _MaskRouterProducts(absent):
            yield
    finally:
        for bias, original in saved:
            bias.data.copy_(original)
