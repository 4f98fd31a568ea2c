"""How many parameters a stored tensor stands for.

Quantised formats pack several weights into one stored element (mxfp4 blocks, GPTQ and AWQ qweight, compressed-tensors
weight_packed, bitsandbytes 4-bit) and add scales and zero points that are no parameters. Counting stored elements would
make a 4-bit model look half or an eighth of its size.
"""

from __future__ import annotations

import re
from typing import Any

from xmac_cli.checkpoint.header import TensorInfo, dtype_bits

_SIDE_DATA = re.compile(
    r".*(?:[._]scales?(?:_inv|_2)?|\.qzeros|\.g_idx|\.weight_shape|zero_point|\.weight_g_idx|input_scale"
    r"|\.absmax|\.quant_map|\.nested_\w+|\.quant_state\.\w+|\.SCB|\.weight_format)"
)
_BLOCKS = re.compile(r".*_blocks")
_PACKED = re.compile(r".*\.(?:qweight|weight_packed)")


def quantization_method(config: dict[str, Any]) -> str | None:
    """Return quant_method of a config (top level or text model), or None when the weights are plain."""
    section = quantization_section(config)
    return None if section is None else str(section.get("quant_method", "unknown"))


def quantization_section(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the quantisation entry of a config, wherever families keep it."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            section = place.get(key)
            if isinstance(section, dict):
                return section
    return None


def parameter_count(info: TensorInfo, section: dict[str, Any] | None) -> int:
    """Return the number of model parameters in a tensor.

    Args:
        info: the tensor.
        section: from `quantization_section`; None means every element is a parameter.

    Returns:
        0 for scales, zero points and other data that only describes quantised weights.
    """
    if section is None:
        return info.numel
    if _SIDE_DATA.fullmatch(info.name):
        return 0
    stored = dtype_bits(info.dtype) or 8
    if _BLOCKS.fullmatch(info.name) and info.dtype == "U8":
        return info.numel * stored // 4
    if _PACKED.fullmatch(info.name):
        return info.numel * stored // weight_bits(section)
    if section.get("load_in_4bit") or section.get("_load_in_4bit"):
        return info.numel * 2 if info.dtype == "U8" else info.numel
    return info.numel


def weight_bits(section: dict[str, Any]) -> int:
    """Return the bits of one packed weight: GPTQ and AWQ say `bits`, compressed-tensors says it in each group."""
    candidates = [section.get("bits"), section.get("w_bit")]
    groups = section.get("config_groups")
    if isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            candidates.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    for bits in candidates:
        if isinstance(bits, int) and not isinstance(bits, bool) and 1 <= bits <= 8:
            return bits
    return 4
