"""A pruned checkpoint computes what its source computes with the removed experts masked, for every supported family.

The masked source is an independent reference (support/masked_reference.py). Every layer keeps a different set.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.prune_cases import prune_to
from support.tiny_moe import (
    TINY,
    build_tiny,
    different_kept,
    load_tiny,
    logits,
    masked_logits,
    probe_tokens,
    save_tiny,
)

from xmac_cli.prune_moe.families import FAMILIES
from xmac_cli.prune_moe.layout import sniff_layout

TOLERANCE = 1e-5
# Router groups of four experts: the same number must stay in each.
BALANCED = ([0, 1, 3, 4, 5, 7], [1, 2, 3, 4, 6, 7], [0, 2, 3, 5, 6, 7])


def kept_sets(model_type: str, grouped: bool) -> dict[int, list[int]]:
    if grouped:
        return dict(zip(TINY[model_type].moe_layers, BALANCED))
    return different_kept(model_type, 6)


def largest_difference(source: object, result: Path, model_type: str, kept: dict[int, list[int]]) -> float:
    """Largest |logit difference| between the masked source model and the pruned files; nothing may be missing."""
    tokens = probe_tokens()
    expected = masked_logits(source, tokens, kept)
    assert (expected - logits(source, tokens)).abs().max() > 100 * TOLERANCE, "masking must be visible"
    pruned, info = load_tiny(result, model_type)
    assert not any(info.values()), f"transformers reports {info}"
    return float((expected - logits(pruned, tokens)).abs().max())


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_pruned_files_compute_the_masked_original(model_type: str, tmp_path: Path) -> None:
    model = build_tiny(model_type)
    for name in ("hub", "fused"):
        source = save_tiny(model, tmp_path / name, fused=name == "fused")
        layout = sniff_layout(source)
        assert tuple(layer.layer for layer in layout.layers) == TINY[model_type].moe_layers
        assert (layout.num_experts, layout.top_k) == (8, 2)
        kept = kept_sets(model_type, layout.n_group > 1)
        result = tmp_path / f"{name}-pruned"
        prune_to(source, result, kept)
        assert largest_difference(model, result, model_type, kept) < TOLERANCE


def test_every_row_of_the_family_table_is_covered() -> None:
    covered = set(TINY) | {"kimi_k2"}
    assert {model_type for family in FAMILIES for model_type in family.model_types} == covered


def test_kimi_k2_has_the_files_of_deepseek_v3(tmp_path: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    model = build_tiny("deepseek_v3", n_group=1, topk_group=1)
    source = save_tiny(model, tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    kept = different_kept("deepseek_v3", 6)
    prune_to(source, tmp_path / "b", kept)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "kimi_k2"
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    pruned = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "b").eval()
    difference = masked_logits(model, probe_tokens(), kept) - logits(pruned, probe_tokens())
    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe", "gpt_oss", "granitemoe", "dbrx"])
@pytest.mark.parametrize("fused", [False, True])
def test_hidden_size_equal_to_the_number_of_experts(model_type: str, fused: bool, tmp_path: Path) -> None:
    model = build_tiny(model_type, num_experts=32)
    assert 32 in (model.config.hidden_size, getattr(model.config, "d_model", None))
    source = save_tiny(model, tmp_path / "a", fused=fused)
    kept = different_kept(model_type, 21, num_experts=32)
    prune_to(source, tmp_path / "b", kept)
    assert largest_difference(model, tmp_path / "b", model_type, kept) < TOLERANCE


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_bfloat16_weights_are_the_same_numbers(model_type: str, tmp_path: Path) -> None:
    """Loaded in float32, pruned bfloat16 files equal the masked bfloat16 source: no weight was rounded again."""
    saved = save_tiny(build_tiny(model_type, dtype=torch.bfloat16), tmp_path / "a")
    source, _ = load_tiny(saved, model_type)
    kept = kept_sets(model_type, model_type == "deepseek_v3")
    prune_to(saved, tmp_path / "b", kept)
    assert largest_difference(source, tmp_path / "b", model_type, kept) < TOLERANCE


@pytest.mark.parametrize(("model_type", "keep"), [("mixtral", 2), ("olmoe", 3), ("gpt_oss", 2), ("jamba", 2)])
def test_down_to_as_few_experts_as_a_token_uses(model_type: str, keep: int, tmp_path: Path) -> None:
    model = build_tiny(model_type)
    source = save_tiny(model, tmp_path / "a")
    kept = different_kept(model_type, keep)
    prune_to(source, tmp_path / "b", kept)
    assert largest_difference(model, tmp_path / "b", model_type, kept) < TOLERANCE
