"""How many model parameters a stored tensor stands for, also when it is packed.

A 4-bit weight packed eight to an int32 counts its weights, not its integers; scales, zero points and other companions
of quantised weights count as none, so that a quantised checkpoint has as many parameters as the model it came from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from xmac_cli.checkpoint.header import TensorInfo, dtype_bits

_COMPANION = re.compile(
    r"(?:(?:weight|input|proj)_(?:\w+_)?scales?(?:_inv|_2)?|\.scales|\.qzeros|\.g_idx"
    r"|weight_(?:shape|zero_point|g_idx)|\.absmax|\.quant_map|\.nested_\w+)$"
)
_PACKED = re.compile(r"(?:qweight|weight_packed)$")
_BLOCKS = re.compile(r"_blocks$")
_DEFAULT_PACKED_BITS = 4


def packed_bits(config: Mapping[str, Any]) -> int:
    """Bits of one weight in the packed tensors of a checkpoint, from its `quantization_config`."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return _DEFAULT_PACKED_BITS
    candidates = [quantization.get("bits"), quantization.get("w_bit")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        candidates.append(weights.get("num_bits") if isinstance(weights, Mapping) else None)
    return next((bits for bits in candidates if isinstance(bits, int) and bits > 0), _DEFAULT_PACKED_BITS)


def parameters_of(tensor: TensorInfo, bits: int) -> int:
    """Number of model parameters that a stored tensor holds.

    Args:
        tensor: from a header.
        bits: bits of one packed weight, see `packed_bits`.
    """
    if _COMPANION.search(tensor.name):
        return 0
    if _BLOCKS.search(tensor.name):
        return tensor.nbytes * 2
    if _PACKED.search(tensor.name) and dtype_bits(tensor.dtype) is not None:
        return tensor.nbytes * 8 // bits
    return tensor.numel
