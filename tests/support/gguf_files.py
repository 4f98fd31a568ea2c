"""A GGUF file of a Llama, written by the gguf package as llama.cpp's converter would write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def permuted(weight: torch.Tensor, heads: int) -> np.ndarray:
    """llama.cpp stores query and key rows with the two halves of the rotary dimension interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).numpy()


def write_gguf(model: Any, tokenizer_file: Path, path: Path) -> None:
    """The model as llama.cpp's converter would write it, in float32."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("test")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    document = json.loads(tokenizer_file.read_text())
    vocabulary = sorted(document["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 4))
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_pad_token_id(1)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            data = permuted(weight, heads) if heads else weight.numpy()
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def character_level_bpe(path: Path) -> int:
    """Write a byte-level tokenizer with four special tokens and a few merges; returns the vocabulary's size."""
    from xmac_cli.models.demo_tokenizer import train_tokenizer

    tokenizer = train_tokenizer({"words": ["the quick brown fox and the lazy dog " * 20]}, 280, 10_000, 64)
    tokenizer.backend_tokenizer.save(str(path))
    return len(tokenizer)
