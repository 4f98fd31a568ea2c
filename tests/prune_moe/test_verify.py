"""Verification finds what is wrong: bytes, names, counts, order of experts, and missing tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.prune_cases import prune_to, scores_keeping
from support.tiny_moe import TINY, build_tiny, different_kept, save_tiny
from support.tiny_quantised import rewrite_tiny

from xmac_cli.cli.errors import VerificationError
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.layout import Layout, sniff_layout
from xmac_cli.prune_moe.plan import make_plan
from xmac_cli.prune_moe.plan_file import Plan
from xmac_cli.prune_moe.surgery import apply_plan
from xmac_cli.prune_moe.verify import verify_pruned

Tensors = dict[str, torch.Tensor]
BLOCK_TYPES = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4", "granitemoe", "jamba", "dbrx", "phimoe"]
BLOCK_TYPES += ["ernie4_5_moe", "nemotron_h", "axk1", "qwen3_vl_moe", "hy_v3", "lfm2_moe"]


def pruned(tmp_path: Path, model_type: str = "mixtral", fused: bool = False) -> tuple[Layout, Plan, Path]:
    source = save_tiny(build_tiny(model_type), tmp_path / "a", fused=fused)
    kept = different_kept(model_type, 6)
    if sniff_layout(source).n_group > 1:
        kept = dict(zip(TINY[model_type].moe_layers, ([0, 1, 3, 4, 5, 7], [1, 2, 3, 4, 6, 7])))
    layout, plan = prune_to(source, tmp_path / "b", kept)
    return layout, plan, tmp_path / "b"


def damage(directory: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    def apply(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        change(tensors, config)
        return tensors

    return rewrite_tiny(directory, apply)


@pytest.mark.parametrize("model_type", BLOCK_TYPES)
@pytest.mark.parametrize("fused", [False, True])
def test_correct_results_pass_at_every_level(model_type: str, fused: bool, tmp_path: Path) -> None:
    layout, plan, result = pruned(tmp_path, model_type, fused)
    for level in ("files", "block", "logits"):
        found = verify_pruned(layout, plan, result, level)
        assert found.tensors == len(load_file(result / "model.safetensors"))
        assert len(found.differences) == {"files": 0, "block": len(layout.layers), "logits": 1}[level]
        assert all(difference.relative < 1e-5 for difference in found.differences)
    assert all(difference.scale > 1e-3 for difference in verify_pruned(layout, plan, result, "block").differences)


W1 = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
GATE = "model.layers.2.block_sparse_moe.gate.weight"


def one_bit(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[W1.format(2)].view(torch.int32)[3, 4] ^= 1


def exchanged(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[W1.format(2)], tensors[W1.format(3)] = tensors[W1.format(3)], tensors[W1.format(2)]


def rolled_router(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE].roll(1, dims=0)


def other_weight(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["model.norm.weight"] += 1e-6


def missing(tensors: Tensors, config: dict[str, Any]) -> None:
    del tensors[W1.format(5)]


def extra(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[W1.format(6)] = tensors[W1.format(5)].clone()


def narrower(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors[W1.format(5)] = tensors[W1.format(5)].half()


def stale_count(tensors: Tensors, config: dict[str, Any]) -> None:
    config["num_local_experts"] = 8


def stale_alias(tensors: Tensors, config: dict[str, Any]) -> None:
    config["num_experts"] = 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_bit, r"experts\.2\.w1\.weight .* is not what the plan takes"),
        (exchanged, r"experts\.[23]\.w1\.weight .* is not what the plan takes"),
        (rolled_router, r"layers\.2\.block_sparse_moe\.gate\.weight"),
        (other_weight, r"model\.norm\.weight"),
        (missing, "lacks 1 tensors and has 0"),
        (extra, "lacks 0 tensors and has 1"),
        (narrower, r"is F16 \[40, 32\], expected F32"),
        (stale_count, "num_local_experts = 8, not 6"),
        (stale_alias, "num_experts = 8, not 6"),
    ],
)
def test_damaged_files_are_found(
    change: Callable[[Tensors, dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    layout, plan, result = pruned(tmp_path)
    damage(result, change)
    with pytest.raises(VerificationError, match=message) as caught:
        verify_pruned(layout, plan, result, "files")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("change", [exchanged, rolled_router])
@pytest.mark.parametrize("level", ["block", "logits"])
def test_a_model_that_computes_something_else_is_found(
    change: Callable[[Tensors, dict[str, Any]], None], level: str, tmp_path: Path
) -> None:
    """Without the byte check in front of them: the two model checks see the difference themselves."""
    from xmac_cli.prune_moe.verify_models import verify_blocks, verify_logits

    layout, plan, result = pruned(tmp_path)
    damage(result, change)
    with pytest.raises(VerificationError, match="differs from the masked source"):
        (verify_blocks if level == "block" else verify_logits)(layout, plan, result)


def test_keys_that_transformers_does_not_find_are_failures(tmp_path: Path) -> None:
    from xmac_cli.prune_moe.verify_models import verify_blocks, verify_logits

    layout, plan, result = pruned(tmp_path, "deepseek_v3")
    damage(result, lambda t, c: t.pop("model.layers.1.mlp.shared_experts.up_proj.weight"))
    with pytest.raises(VerificationError, match=r"does not load .* completely"):
        verify_logits(layout, plan, result)
    with pytest.raises(VerificationError, match="does not fill the module"):
        verify_blocks(layout, plan, result)


def test_a_model_cut_to_one_expert_would_load_with_random_weights(tmp_path: Path) -> None:
    """Why plans never go below two: for one expert Jamba builds a dense MLP, and only loading's record complains."""
    source = save_tiny(build_tiny("jamba"), tmp_path / "a")

    def cut(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if "experts." in name and "experts.0." not in name]:
            del tensors[name]
        for name in [name for name in tensors if "router" in name]:
            tensors[name] = tensors[name][:1]
        config["num_experts"] = config["num_experts_per_tok"] = 1

    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(damage(source, cut), output_loading_info=True)
    assert info["missing_keys"]
    assert info["unexpected_keys"]


@pytest.mark.parametrize("where", ["weight", "router", "bias"])
def test_an_empty_slot_that_is_not_empty_is_found(where: str, tmp_path: Path) -> None:
    source = save_tiny(build_tiny("minimax_m2"), tmp_path / "a")
    layout = sniff_layout(source)
    kept = {0: [0, 1, 2, 3, 4, 5], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3, 4, 5]}
    scores = scores_keeping(layout, kept)
    plan = make_plan(layout, scores, Budget.of(ratio=8 / 24), allocation="global")
    assert [len(layer.keep) for layer in plan.layers] == [6, 4, 6]
    apply_plan(source, tmp_path / "b", plan)
    verify_pruned(layout, plan, tmp_path / "b", "logits")
    block = "model.layers.1.block_sparse_moe"

    def fill(tensors: Tensors, config: dict[str, Any]) -> None:
        if where == "weight":
            tensors[f"{block}.experts.5.w2.weight"][0, 0] = 1e-3
        elif where == "router":
            tensors[f"{block}.gate.weight"][4, 0] = 1e-3
        else:
            tensors[f"{block}.e_score_correction_bias"][5] = -5.0

    damage(tmp_path / "b", fill)
    with pytest.raises(VerificationError, match="is not what the plan takes"):
        verify_pruned(layout, plan, tmp_path / "b", "files")


def test_a_wrong_total_in_the_index_is_found(tmp_path: Path) -> None:
    source = save_tiny(build_tiny("mixtral"), tmp_path / "a", max_shard_size="100KB")
    layout, plan = prune_to(source, tmp_path / "b", different_kept("mixtral", 6))
    path = tmp_path / "b" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))
    with pytest.raises(VerificationError, match="the index of"):
        verify_pruned(layout, plan, tmp_path / "b")


def test_none_checks_nothing(tmp_path: Path) -> None:
    layout, plan, result = pruned(tmp_path)
    damage(result, one_bit)
    assert verify_pruned(layout, plan, result, "none").as_json() == {
        "level": "none",
        "tensors": 0,
        "largest_difference": None,
    }
