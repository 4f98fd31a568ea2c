"""Which part of a model a tensor belongs to, told from its name alone.

Names are read the way their authors built them: components between dots, from the outside in. A tower or an extra
prediction layer claims everything inside it; then norms; inside a block that has experts, the expert, router and shared
names; then attention and dense MLP. What no rule knows is "other", never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

PARTS = (
    "embedding",
    "attention",
    "router",
    "routed experts",
    "shared experts",
    "dense mlp",
    "state space",
    "norms",
    "head",
    "vision",
    "audio",
    "next-token layers",
    "other",
)

_EXPERT = re.compile(r"(?:(?P<block>.+)\.)?experts\.(?P<inside>.+)")
_LAYER = re.compile(r"\b(?:layers|h|blocks|block)\.(\d+)\.")
_STACKED = re.compile(r"(?P<block>.+)\.(?:input_linear|output_linear)\.weight")
_ROUTER = frozenset(
    ("gate", "router", "e_score_correction_bias", "expert_bias", "moe_statics", "gate_weight", "per_expert_scale")
)
_SHARED = re.compile(r"shared?_(?:experts?|mlp)(?:_gate)?")
_TOWERS = (
    ("vision", re.compile(r"visual|vision\w*|image_newline|multi_modal_projector|mm_projector|patch_embed\w*|img_\w+")),
    ("audio", re.compile(r"audio\w*|speech\w*")),
    ("next-token layers", re.compile(r"mtp\w*")),
)
_EMBEDDING = frozenset(
    ("embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "tok_embeddings", "embeddings", "position_embeddings")
    + ("embed_positions", "embedding", "token_embd")
)
_HEAD = frozenset(("lm_head", "embed_out", "output", "score", "classifier", "v_head"))
_NORM = re.compile(r"\w*norm\w*|ln(?:_\w+|\d)?|(?:\w+_)?layernorm\w*")
_ATTENTION = re.compile(r"(?:\w+_)?(?:attn|attention)(?:_\w+)?|[qkvo]_proj|qkv\w*|sinks|query_key_value|Wqkv|c_attn")
_MLP = re.compile(
    r"mlp|feed_forward|ffn|ff|(?:gate|up|down|gate_up)_proj|[wv][123]|fc[12]|c_fc|dense_\w+|block_sparse_moe"
)
_STATE_SPACE = re.compile(r"mamba\w*|mixer|ssm\w*|conv|short_conv|recurrent\w*|temporal_block")


@dataclass(frozen=True)
class ExpertPlace:
    """Where a routed expert's tensor sits.

    Args:
        block: name of the block, as in "model.layers.3.mlp".
        expert: its number, or None when one tensor holds all experts of the block.
    """

    block: str
    expert: int | None


def expert_place(name: str, axes: int) -> ExpertPlace | None:
    """Return the block and number of a routed expert, or None when the tensor is not one.

    Args:
        name: tensor name.
        axes: number of axes; a `input_linear` of three axes is a stack of experts, of two it is an ordinary layer.
    """
    if match := _EXPERT.fullmatch(name):
        first = match["inside"].split(".", 1)[0]
        return ExpertPlace(match["block"] or "", int(first) if first.isdecimal() else None)
    if axes == 3 and (match := _STACKED.fullmatch(name)):
        return ExpertPlace(match["block"], None)
    return None


def layer_number(name: str) -> int | None:
    """Return the number of the layer that a tensor or block belongs to, or None."""
    match = _LAYER.search(f"{name}.")
    return int(match[1]) if match else None


class PartClassifier:
    """Tells parts apart within one checkpoint.

    Args:
        places: what `expert_place` says of every tensor; tells which blocks have experts.
        num_layers: layers the config speaks of; deeper ones are next-token prediction layers (DeepSeek-V3, GLM-4.5).
    """

    def __init__(self, places: Mapping[str, ExpertPlace | None], num_layers: int | None) -> None:
        self._places = places
        self._blocks = {place.block for place in places.values() if place is not None}
        self._num_layers = num_layers

    def part(self, name: str) -> str:
        """Return the part of a tensor, one of PARTS."""
        components = name.split(".")
        for component in components[:-1]:
            if tower := _tower(component):
                return tower
        if self._num_layers is not None and (layer_number(name) or 0) >= max(self._num_layers, 1):
            return "next-token layers"
        if self._places[name] is not None:
            return "routed experts"
        if any(_SHARED.fullmatch(component) for component in components):
            return "shared experts"
        if self._is_router(components):
            return "router"
        return _plain_part(components)

    def _is_router(self, components: list[str]) -> bool:
        """Tell whether a router's name follows directly on a block that has experts."""
        for length in range(len(components) - 1, -1, -1):
            if ".".join(components[:length]) in self._blocks:
                return components[length] in _ROUTER
        return False


@lru_cache(maxsize=4096)
def _tower(component: str) -> str | None:
    """Return the tower or drafting layers that a component of a name opens (cached: the same few occur everywhere)."""
    return next((tower for tower, pattern in _TOWERS if pattern.fullmatch(component)), None)


def _plain_part(components: list[str]) -> str:
    modules = components[:-1] if components[-1] in ("weight", "bias") else components
    if modules and _NORM.fullmatch(modules[-1]):
        return "norms"
    if any(component in _EMBEDDING for component in modules):
        return "embedding"
    if modules and modules[-1] in _HEAD and layer_number(".".join(components)) is None:
        return "head"
    if any(_ATTENTION.fullmatch(component) for component in modules):
        return "attention"
    if any(_MLP.fullmatch(component) for component in modules):
        return "dense mlp"
    if any(_STATE_SPACE.fullmatch(component) for component in modules):
        return "state space"
    return "other"
