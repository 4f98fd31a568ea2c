"""Tiny random mixture-of-experts models of every supported transformers model type.

Every model has 8 routed experts and top-2 unless asked otherwise, router rows of standard deviation 1 and random
selection biases, so that routing is far from uniform and dropping an expert visibly changes the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from support.masked_reference import reference_masking, router_weights, selection_biases

NUM_EXPERTS = 8
TOP_K = 2
NUM_LAYERS = 3

_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}
_LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_HEAD: dict[str, Any] = {"head_dim": 8}
_FIRST_DENSE: dict[str, Any] = {"first_k_dense_replace": 1}
_MLP_TYPES: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_NARROW: dict[str, Any] = {"moe_intermediate_size": 12}
_ONE_SHARED: dict[str, Any] = {"n_shared_experts": 1}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_QWEN_VISION: dict[str, Any] = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_PLAIN_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class TinyMoE:
    """How to configure one tiny model.

    Args:
        count_key: config key of the number of routed experts.
        top_k_key: config key of the number of experts per token.
        options: further config keys, over the common ones.
        vision: configuration of the vision tower of a vision-language model; the rest then goes to `text_config`.
        tower: the sub-model to run for logits; "" = the whole model.
        moe_layers: indices of the layers that have routed experts.
    """

    count_key: str
    options: Mapping[str, Any] = field(default_factory=dict)
    top_k_key: str = "num_experts_per_tok"
    vision: Mapping[str, Any] | None = None
    tower: str = ""
    moe_layers: tuple[int, ...] = (0, 1, 2)


def _deepseek(*parts: Mapping[str, Any], **options: Any) -> TinyMoE:
    merged: dict[str, Any] = {**_NARROW, **_ONE_SHARED}
    for part in parts:
        merged.update(part)
    return TinyMoE("n_routed_experts", {**merged, **options}, moe_layers=(1, 2))


_LLAMA4 = TinyMoE(
    "num_local_experts",
    {**_HEAD, "intermediate_size": 12, "intermediate_size_mlp": 40, "moe_layers": [1, 2]},
    moe_layers=(1, 2),
)
_ARIA = TinyMoE("moe_num_experts", {"intermediate_size": 12, "moe_num_shared_experts": 1}, top_k_key="moe_topk")

TINY: dict[str, TinyMoE] = {
    "mixtral": TinyMoE("num_local_experts"),
    "minimax": TinyMoE(
        "num_local_experts",
        {**_HEAD, "layer_types": ["full_attention", "linear_attention", "full_attention"], "block_size": 16},
    ),
    "minimax_m2": TinyMoE("num_local_experts", _HEAD),
    "phimoe": TinyMoE("num_local_experts"),
    "qwen2_moe": TinyMoE("num_experts", {**_NARROW, "shared_expert_intermediate_size": 20}),
    "qwen3_moe": TinyMoE("num_local_experts", {**_NARROW, **_HEAD, "norm_topk_prob": True}),
    "qwen3_next": TinyMoE(
        "num_experts", {**_NARROW, **_HEAD, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 20}
    ),
    "qwen3_5_moe_text": TinyMoE(
        "num_experts", {**_NARROW, **_HEAD, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 20}
    ),
    "qwen3_5_moe": TinyMoE(
        "num_experts",
        {**_NARROW, **_HEAD, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 20},
        vision=_QWEN_VISION,
    ),
    "qwen3_vl_moe": TinyMoE("num_local_experts", {**_NARROW, **_HEAD}, vision=_QWEN_VISION),
    "olmoe": TinyMoE("num_experts"),
    "flex_olmo": TinyMoE("num_experts"),
    "deepseek_v2": _deepseek(_LATENT_ATTENTION, _FIRST_DENSE),
    "deepseek_v3": _deepseek(_LATENT_ATTENTION, _FIRST_DENSE, n_group=2, topk_group=1),
    "deepseek_v32": _deepseek(_LATENT_ATTENTION, _FIRST_DENSE, _INDEXER, _MLP_TYPES, n_group=2, topk_group=1),
    "glm4_moe": _deepseek(_HEAD, _FIRST_DENSE),
    "glm4v_moe": replace(
        _deepseek(
            _HEAD,
            _FIRST_DENSE,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.5,
            },
        ),
        vision=_VISION,
    ),
    "kimi_k25": replace(
        _deepseek(_LATENT_ATTENTION, _FIRST_DENSE, n_group=1, topk_group=1, model_type="kimi_k2"), vision=_PLAIN_VISION
    ),
    "glm4_moe_lite": _deepseek(_LATENT_ATTENTION, _MLP_TYPES),
    "glm_moe_dsa": _deepseek(_LATENT_ATTENTION, _MLP_TYPES, _INDEXER),
    "dots1": _deepseek(_HEAD, _FIRST_DENSE),
    "solar_open": TinyMoE("n_routed_experts", {**_NARROW, **_ONE_SHARED, **_HEAD}),
    "mimo_v2_flash": _deepseek(_HEAD, _MLP_TYPES),
    "sarvam_mla": _deepseek(_LATENT_ATTENTION, _FIRST_DENSE),
    "sarvam_moe": _deepseek(_HEAD, _FIRST_DENSE),
    "axk1": _deepseek(_LATENT_ATTENTION, _MLP_TYPES, n_group=2, topk_group=1),
    "axk2": _deepseek(_LATENT_ATTENTION, _MLP_TYPES),
    "hy_v4": _deepseek(_MLP_TYPES),
    "exaone_moe": TinyMoE(
        "num_experts", {**_NARROW, **_HEAD, **_MLP_TYPES, "num_shared_experts": 1}, moe_layers=(1, 2)
    ),
    "hy_v3": TinyMoE("num_experts", {**_NARROW, **_HEAD, **_MLP_TYPES, "num_shared_experts": 1}, moe_layers=(1, 2)),
    "afmoe": TinyMoE(
        "num_experts", {**_NARROW, **_HEAD, "num_shared_experts": 1, "num_dense_layers": 1}, moe_layers=(1, 2)
    ),
    "laguna": TinyMoE(
        "num_experts",
        {**_NARROW, **_HEAD, **_MLP_TYPES, "shared_expert_intermediate_size": 20},
        moe_layers=(1, 2),
    ),
    "lfm2_moe": TinyMoE(
        "num_experts",
        {**_NARROW, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
        moe_layers=(1, 2),
    ),
    "kimi_linear": TinyMoE(
        "num_experts",
        {
            **_NARROW,
            **_LATENT_ATTENTION,
            **_MLP_TYPES,
            "num_shared_experts": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
        },
        top_k_key="num_experts_per_token",
        moe_layers=(1, 2),
    ),
    "bailing_hybrid": TinyMoE(
        "num_experts",
        {
            **_NARROW,
            **_LATENT_ATTENTION,
            **_MLP_TYPES,
            "num_shared_experts": 1,
            "num_expert_group": 2,
            "topk_group": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        top_k_key="num_experts_per_token",
        moe_layers=(1, 2),
    ),
    "ernie4_5_moe": TinyMoE(
        "moe_num_experts",
        {**_NARROW, "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
        top_k_key="moe_k",
        moe_layers=(1, 2),
    ),
    "hunyuan_v1_moe": TinyMoE("num_experts", _HEAD, top_k_key="moe_topk"),
    "cohere2_moe": TinyMoE("num_experts", {"logit_scale": 1.0}),
    "mellum": TinyMoE("num_local_experts", {**_NARROW, **_HEAD}),
    "gpt_oss": TinyMoE("num_local_experts", _HEAD),
    "llama4_text": _LLAMA4,
    "llama4": replace(
        _LLAMA4,
        vision={
            **_PLAIN_VISION,
            "intermediate_size": 64,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        tower="language_model",
    ),
    "granitemoe": TinyMoE("num_local_experts"),
    "granitemoe_swa": TinyMoE("num_local_experts"),
    "granitemoeshared": TinyMoE("num_local_experts", {"shared_intermediate_size": 20}),
    "granitemoehybrid": TinyMoE(
        "num_local_experts",
        {
            "shared_intermediate_size": 20,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
    ),
    "aria_text": _ARIA,
    "aria": replace(_ARIA, vision={**_PLAIN_VISION, "model_type": "idefics3_vision"}),
    "jamba": TinyMoE(
        "num_experts",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        moe_layers=(0, 2),
    ),
    "dbrx": TinyMoE(
        "moe_num_experts",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": NUM_LAYERS,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 12, "ffn_act_fn": {"name": "silu"}},
        },
        top_k_key="moe_top_k",
    ),
    "nemotron_h": TinyMoE(
        "n_routed_experts",
        {
            **_NARROW,
            **_HEAD,
            "moe_shared_expert_intermediate_size": 20,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "use_mamba_kernels": False,
        },
        moe_layers=(1, 3),
    ),
}


def tiny_config(model_type: str, *, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K, **overrides: Any) -> Any:
    """Configuration of a tiny model; `overrides` are config keys of the language model."""
    from transformers import AutoConfig

    tiny = TINY[model_type]
    options = {**_BASE, **tiny.options}
    counts = {tiny.count_key: num_experts, tiny.top_k_key: top_k}
    if model_type == "dbrx":
        options["ffn_config"] = {**options["ffn_config"], **counts}
        counts = {}
    options = {**options, **counts, **overrides}
    if tiny.vision is not None:
        return AutoConfig.for_model(model_type, text_config=options, vision_config=dict(tiny.vision))
    return AutoConfig.for_model(model_type, **options)


def build_tiny(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A tiny random model in evaluation mode.

    Args:
        model_type: a key of `TINY`.
        seed: of the weights.
        dtype: of the weights.
        overrides: `num_experts`, `top_k`, or config keys.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(model_type, **overrides)
    factory = AutoModelForImageTextToText if TINY[model_type].vision else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = factory.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for tensor in (t for layer in router_weights(model).values() for t in layer):
            tensor.normal_(0.0, 1.0, generator=generator)
        for tensor in (t for layer in selection_biases(model).values() for t in layer):
            tensor.normal_(0.0, 0.3, generator=generator)
        for name, tensor in model.named_parameters():
            if name.endswith(("proj_bias", "experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2")):
                tensor.normal_(0.0, 0.2, generator=generator)
    return (model if dtype == torch.float32 else model.to(dtype)).eval()


def save_tiny(model: Any, directory: Path, *, fused: bool = False, max_shard_size: int | str = "50GB") -> Path:
    """Save in the layout of the hub (`fused=False`) or in transformers' own fused layout."""
    model.save_pretrained(directory, save_original_format=not fused, max_shard_size=max_shard_size)
    return directory


def load_tiny(directory: Path, model_type: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """Load with plain transformers.

    Returns:
        (model in evaluation mode, transformers' own record of missing, unexpected and mismatched keys).
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    factory = AutoModelForImageTextToText if TINY[model_type].vision else AutoModelForCausalLM
    model, info = factory.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    return model.eval(), info


def probe_tokens(*, batch: int = 3, length: int = 12, seed: int = 7) -> torch.Tensor:
    """Token ids [batch, length] without special tokens."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [batch, length, vocabulary] in float32."""
    with torch.no_grad():
        return runnable(model)(input_ids=tokens, use_cache=False).logits.float()


def runnable(model: Any) -> Any:
    """The part of a model that turns token ids into logits without images."""
    tower = TINY[model.config.model_type].tower
    return getattr(model, tower) if tower else model


def different_kept(
    model_type: str, keep: int, *, num_experts: int = NUM_EXPERTS, seed: int = 3
) -> dict[int, list[int]]:
    """A different ascending set of `keep` expert ids for every MoE layer."""
    generator = torch.Generator().manual_seed(seed)
    kept: dict[int, list[int]] = {}
    for layer in TINY[model_type].moe_layers:
        ids = sorted(torch.randperm(num_experts, generator=generator)[:keep].tolist())
        while ids in kept.values() or ids == list(range(keep)):
            ids = sorted(torch.randperm(num_experts, generator=generator)[:keep].tolist())
        kept[layer] = ids
    return kept


def masked_logits(model: Any, tokens: torch.Tensor, kept: Mapping[int, Sequence[int]]) -> torch.Tensor:
    """Logits of the model with the router logits of all but the kept experts at -inf."""
    with reference_masking(model, kept):
        return logits(model, tokens)
