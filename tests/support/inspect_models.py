"""Small random models of many families, and their parameters counted by module class instead of by tensor name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import transformers as hf
from torch import nn

_SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MAMBA = {"expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
_SHARED = {"shared_expert_intermediate_size": 16}

CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**_SIZE),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    ),
    "mixtral": lambda: hf.MixtralConfig(**_SIZE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**_SIZE, **_MOE, **_SHARED, num_experts=6),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_SIZE, **_MOE, num_experts=6, head_dim=8),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_SIZE, **_MOE, **_SHARED, **_LINEAR, num_experts=4, head_dim=8),
    "olmoe": lambda: hf.OlmoeConfig(**_SIZE, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_SIZE, **_MOE, **_MLA, n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**_SIZE, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "granitemoe": lambda: hf.GraniteMoeConfig(**_SIZE, num_local_experts=4, num_experts_per_tok=2),
    "llama4_text": lambda: hf.Llama4TextConfig(
        **_SIZE, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64, head_dim=8
    ),
    "jamba": lambda: hf.JambaConfig(**_SIZE, **_MAMBA, num_experts=4, num_experts_per_tok=2, mamba_d_state=4),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **_SIZE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1
    ),
}


def parameters_by_module(model: nn.Module) -> Counter[str]:
    """Count parameters by the class of the module that holds them.

    The innermost module that one of the rules knows decides; a router is what lies in a MoE block and in none of its
    experts, apart from the gate of a shared expert.
    """
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[_part_of(model, name.split(".")[:-1])] += parameter.numel()
    return counts


def _part_of(model: nn.Module, path: list[str]) -> str:
    part = "head"  # what lies directly below the causal language model and is no embedding
    module = model
    for step in path:
        module = getattr(module, step)
        is_shared_gate = part == "router" and isinstance(module, nn.Linear) and step.startswith("shared")
        part = "shared experts" if is_shared_gate else _part_of_class(type(module).__name__, part)
    return part


def _part_of_class(name: str, outer: str) -> str:
    if name.endswith(("RMSNorm", "LayerNorm", "L2Norm", "RMSNormGated")):
        return "norms"
    if name == "Embedding":
        return "embedding"
    if name.endswith(("Attention", "GatedDeltaNet")):
        return "attention"
    if name.endswith("MambaMixer"):
        return "state space"
    if name.endswith(("Experts", "ParallelExperts", "ExpertsModulelist")):
        return "routed experts"
    if name.endswith(("SparseMoeBlock", "MoE", "TextMoe", "SparseMoe", "GptOssMLP")):
        return "router"
    if name.endswith(("Router", "TopKGating", "TopkRouter", "MoeStatics")):
        return "router"
    if name.endswith("MLP"):
        return "shared experts" if outer == "router" else "dense mlp"
    return outer
