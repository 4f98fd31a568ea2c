"""Sizes of the demo MoE and how it is trained; the numbers that decide what its weights become."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from xmac_cli.cli.errors import UsageError

# Raised whenever the same recipe would give other weights, so that a cached model of an older xmac is not reused.
DEMO_VERSION = 1

_MIXTURE = {"code": 0.34, "docs": 0.20, "json": 0.14, "names": 0.14, "tables": 0.10, "changelog": 0.08}


@dataclass(frozen=True)
class DemoMoeRecipe:
    """A Qwen3-MoE and its training run.

    Args:
        corpus: size of the standard-library corpus (`stdlib_corpus.SIZES`).
        vocabulary: tokens of the byte-level BPE.
        hidden, layers, heads, kv_heads: as in transformers' Qwen3MoeConfig.
        experts, expert_width, top_k: routed experts per layer, their inner width, experts per token.
        steps, rows, seqlen: optimizer steps of `rows` sequences of `seqlen` tokens, which is also the longest input.
        initializer_range: standard deviation of fresh weights; the usual 0.02 is too timid at this width and budget.
        lr, weight_decay, warmup_steps: AdamW; the schedule is warm-up, stable, decay.
        balance: weight of the load-balancing loss (2 when balanced, so that it adds 2 * balance).
        mixture: share of the training rows per domain.
    """

    corpus: str = "demo"
    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    experts: int = 16
    expert_width: int = 128
    top_k: int = 2
    steps: int = 1300
    rows: int = 4
    seqlen: int = 256
    lr: float = 5e-3
    initializer_range: float = 0.06
    weight_decay: float = 0.1
    warmup_steps: int = 50
    balance: float = 0.003
    mixture: Mapping[str, float] = field(default_factory=lambda: dict(_MIXTURE))

    def key(self, seed: int, corpus_fingerprint: str) -> str:
        """Identity of the model: recipe, seed, text and version of the method."""
        document = [DEMO_VERSION, asdict(self), seed, corpus_fingerprint]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


RECIPES: Mapping[str, DemoMoeRecipe] = {
    "demo": DemoMoeRecipe(),
    "tiny": DemoMoeRecipe(
        corpus="tiny",
        vocabulary=512,
        hidden=64,
        experts=8,
        expert_width=32,
        steps=120,
        rows=8,
        seqlen=64,
        lr=1e-2,
        initializer_range=0.1,
        warmup_steps=10,
    ),
}


def demo_recipe(size: str) -> DemoMoeRecipe:
    """The recipe of a size.

    Raises:
        UsageError: no such size.
    """
    if size not in RECIPES:
        raise UsageError(f"the demo MoE has no size '{size}'", f"choose one of {', '.join(RECIPES)}")
    return RECIPES[size]
