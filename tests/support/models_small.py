"""Random models small enough for float64 references."""

from __future__ import annotations

from typing import Any

import torch


def small_llama(seed: int, vocabulary: int = 50) -> Any:
    """A two-layer Llama in eval mode whose predictions differ clearly between tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=2,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).eval()
