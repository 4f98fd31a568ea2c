"""Run only the decoder layers from layer l on, with the full model's activations in front of it.

In a layer game all layers below l are intact, so what enters layer l never changes. The output of layer l-1 is recorded
once; afterwards the layers below l hand it over instead of computing. Everything else of the forward pass (masks,
position embeddings, final norm) runs as usual.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xmac_cli.cli.errors import UnsupportedModelError
from xmac_cli.prune_moe.moe_blocks import MoEModule

_CONTAINER = re.compile(r"^(.*?(?:layers|blocks|h))\.(\d+)(?:\.|$)")


class LayerSuffix:
    """Recorded activations in front of one decoder layer.

    Args:
        model: the live model.
        entry: MoE block whose decoder layer is the first to be computed.
    """

    def __init__(self, model: nn.Module, entry: MoEModule) -> None:
        match = _CONTAINER.match(entry.name)
        layers = model.get_submodule(match.group(1)) if match else None
        if not isinstance(layers, nn.ModuleList):
            raise UnsupportedModelError(f"the decoder layers around {entry.name} are not a list, use --scope global")
        self._layers = layers
        self._first = entry.layer
        self._recorded: list[Any] = []
        self._output: Any = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """While active, forward passes append the activations of their rows."""
        with ExitStack() as undo:
            if self._first > 0:
                hook = self._layers[self._first - 1].register_forward_hook(
                    lambda module, args, output: self._recorded.append(output)
                )
                undo.callback(hook.remove)
            yield
        self._output = _concatenate(self._recorded) if self._recorded else None
        self._recorded = []

    @contextmanager
    def replay(self, rows: Tensor) -> Iterator[None]:
        """While active, a forward pass of these rows (int64 [R], of all recorded rows) starts at the layer."""
        with ExitStack() as undo:
            if self._first > 0:
                chosen = _map(self._output, lambda tensor: tensor.index_select(0, rows.to(tensor.device)))
                for layer in list(self._layers)[: self._first]:
                    _replace_forward(layer, lambda *args, **kwargs: chosen, undo)
            yield


def _replace_forward(layer: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    had_own, inner = "forward" in vars(layer), layer.forward
    layer.forward = forward

    def restore() -> None:
        if had_own:
            layer.forward = inner
        else:
            del layer.forward

    undo.callback(restore)


def _map(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple):
        return tuple(_map(part, change) for part in output)
    return output


def _concatenate(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, tuple):
        return tuple(_concatenate([output[i] for output in outputs]) for i in range(len(first)))
    return first
