"""Tiny quantised checkpoints: block-fp8 and mxfp4 that transformers loads, and names of AWQ, GPTQ, compressed-tensors.

The first two hold real quantised numbers, made here with plain torch. The others only have the names, shapes and
dtypes of their formats, with random bytes: enough to check that surgery moves every byte to the right place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tiny_moe import build_tiny, save_tiny

BLOCK = 16
# The sixteen values of FP4 E2M1, by code.
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_EXPERT_WEIGHT = re.compile(r"experts\.\d+\.\w+\.weight$")


def rewrite_tiny(directory: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, Any]]) -> Path:
    """Replace the tensors and the config of a saved single-file checkpoint.

    Args:
        change: gets tensors and config (which it may edit) and returns the new tensors.
    """
    file, config_file = directory / "model.safetensors", directory / "config.json"
    config = json.loads(config_file.read_text())
    tensors = change(load_file(file), config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    config_file.write_text(json.dumps(config, indent=2))
    return directory


def save_block_fp8(directory: Path, model_type: str = "qwen3_moe") -> Path:
    """Experts in float8_e4m3fn with one float32 scale per 16 x 16 block, as DeepSeek-V3 and Qwen3-FP8 store them."""

    def quantise(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if not _EXPERT_WEIGHT.search(name):
                result[name] = tensor
                continue
            rows, columns = tensor.shape
            blocks = tensor.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax(dim=(1, 3)) / 448.0
            result[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
            result[name + "_scale_inv"] = scale
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate", "shared_experts"],
        }
        return result

    save_tiny(build_tiny(model_type, moe_intermediate_size=16), directory)
    return rewrite_tiny(directory, quantise)


def save_mxfp4(directory: Path) -> Path:
    """gpt-oss in mxfp4: 4-bit codes in `_blocks` [E, out, in / 32, 16], an exponent per 32 of them in `_scales`."""

    def quantise(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        result: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if not re.search(r"experts\.(gate_up_proj|down_proj)$", name):
                result[name] = tensor.to(torch.bfloat16)
                continue
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            result[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            result[name + "_scales"] = torch.randint(119, 125, shape, dtype=torch.uint8, generator=generator)
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        }
        return result

    save_tiny(build_tiny("gpt_oss", hidden_size=64, intermediate_size=32), directory)
    return rewrite_tiny(directory, quantise)


def save_packed_names(directory: Path, scheme: str) -> Path:
    """Random bytes under the tensor names of "awq", "gptq" or "compressed-tensors" for the experts of a Qwen3-MoE."""
    generator = torch.Generator().manual_seed(9)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64, generator=generator).to(torch.int32)

    def companions(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        base = name.removesuffix(".weight")
        halves = torch.rand(columns // BLOCK, rows, generator=generator).half()
        if scheme == "awq":
            parts = {"qweight": integers(columns, rows // 8), "qzeros": integers(columns // BLOCK, rows // 8)}
            parts["scales"] = halves
        elif scheme == "gptq":
            parts = {"qweight": integers(columns // 8, rows), "qzeros": integers(columns // BLOCK, rows // 8)}
            parts |= {"scales": halves, "g_idx": torch.arange(columns, dtype=torch.int32) // BLOCK}
        else:
            parts = {"weight_packed": integers(rows, columns // 8), "weight_scale": halves.T.bfloat16()}
            parts["weight_shape"] = torch.tensor([rows, columns], dtype=torch.int64)
        return {f"{base}.{suffix}": tensor for suffix, tensor in parts.items()}

    def pack(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            result |= companions(name, *tensor.shape) if _EXPERT_WEIGHT.search(name) else {name: tensor}
        config["quantization_config"] = _PACKED_CONFIGS[scheme]
        return result

    save_tiny(build_tiny("qwen3_moe", moe_intermediate_size=16), directory)
    return rewrite_tiny(directory, pack)


_PACKED_CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": BLOCK,
        "modules_to_not_convert": ["mlp.gate", "model.layers.0.mlp.experts.3", "model.layers.1.mlp.experts.7.up_proj"],
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": BLOCK,
        "dynamic": {
            r"-:.*mlp\.gate.*": {},
            r"+:model\.layers\.0\.mlp\.experts\.2\..*": {"bits": 8},
            r"+:model\.layers\.2\.mlp\.experts\.5\..*": {"bits": 8},
        },
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": BLOCK}}},
        "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.1.mlp.experts.0.down_proj"],
    },
}
