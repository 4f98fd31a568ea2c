"""What kind of model a config describes, under the many names families use for the same number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts", "moe_top_k") + (
    "num_selected_experts",
    "experts_per_token",
    "moe_num_experts_per_tok",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts") + (
    "n_experts",
    "moe_num_routed_experts",
)
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_FACTS = (
    ("hidden size", ("hidden_size", "d_model", "n_embd")),
    ("attention heads", ("num_attention_heads", "n_heads", "n_head")),
    ("KV heads", ("num_key_value_heads", "kv_n_heads")),
    ("vocabulary", ("vocab_size",)),
    ("context length", ("max_position_embeddings", "max_seq_len", "n_positions")),
)


@dataclass(frozen=True)
class Family:
    """What config.json says.

    Args:
        model_type: the family, "unknown" when the config does not say.
        architectures: class names for transformers.
        num_layers: decoder layers, or None.
        top_k: routed experts used per token, one number or one per layer; None for a dense model.
        num_experts: routed experts per layer according to the config, or None.
        facts: further numbers by their common name.
        tied: whether the output head shares the embedding's tensor.
    """

    model_type: str
    architectures: tuple[str, ...]
    num_layers: int | None
    top_k: int | tuple[int, ...] | None
    num_experts: int | None
    facts: dict[str, int]
    tied: bool


def read_family(config: dict[str, Any]) -> Family:
    """Collect what a config says, from the top level or the text model inside it.

    Args:
        config: parsed config.json; nothing in it is trusted to have the right type.
    """
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    return Family(
        model_type=str(config.get("model_type", "unknown")),
        architectures=tuple(names),
        num_layers=_number(config, _LAYERS),
        top_k=_top_k(config),
        num_experts=_number(config, _EXPERTS),
        facts={name: value for name, keys in _FACTS if (value := _number(config, keys)) is not None},
        tied=any(section.get("tie_word_embeddings") is True for section in _sections(config)),
    )


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the places where the numbers of the language model may be, the most specific first."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config", "ffn_config", "attn_config"):
        section = config.get(key)
        if isinstance(section, dict):
            yield from _sections(section)
    yield config


def _number(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    for section in _sections(config):
        for key in keys:
            value = section.get(key)
            if type(value) is int and value >= 0:
                return value
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                return max(value)
    return None


def _top_k(config: dict[str, Any]) -> int | tuple[int, ...] | None:
    for section in _sections(config):
        for key in _TOP_K:
            value = section.get(key)
            if type(value) is int and value > 0:
                return value
            if isinstance(value, list) and value and all(type(item) is int and item > 0 for item in value):
                return tuple(value) if len(set(value)) > 1 else value[0]
    return None
