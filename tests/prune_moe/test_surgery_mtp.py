"""Next-token-prediction layers: cut by a rule without data, dropped, or kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.prune_cases import prune_to
from support.tiny_moe import build_tiny, load_tiny, logits, masked_logits, probe_tokens, save_tiny
from support.tiny_quantised import rewrite_tiny

from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.mtp import data_free_scores
from xmac_cli.prune_moe.plan import check_plan
from xmac_cli.prune_moe.surgery import apply_plan
from xmac_cli.prune_moe.verify import verify_pruned
from xmac_cli.prune_moe.verify_files import verify_files

KEPT = {
    "glm4_moe": {1: [0, 1, 3, 4, 5, 7], 2: [1, 2, 3, 4, 6, 7]},
    "deepseek_v3": {1: [0, 1, 3, 4, 5, 7], 2: [1, 2, 3, 4, 6, 7]},
    "qwen3_next": {0: [0, 1, 2, 4, 6, 7], 1: [0, 1, 3, 4, 5, 7], 2: [1, 2, 3, 4, 6, 7]},
}
MTP_BLOCK = {"glm4_moe": "model.layers.3.mlp", "deepseek_v3": "model.layers.3.mlp", "qwen3_next": "mtp.layers.0.mlp"}
COUNT_KEY = {
    "glm4_moe": "num_nextn_predict_layers",
    "deepseek_v3": "num_nextn_predict_layers",
    "qwen3_next": "mtp_num_hidden_layers",
}


def save_with_mtp(directory: Path, model_type: str) -> Path:
    """A tiny model whose last layer also serves, with other numbers, as its next-token layer."""

    def add(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        prefix = MTP_BLOCK[model_type].removesuffix("mlp")
        generator = torch.Generator().manual_seed(11)
        extra = {
            name.replace("model.layers.2.", prefix): torch.randn(t.shape, generator=generator)
            for name, t in tensors.items()
            if name.startswith("model.layers.2.")
        }
        extra[f"{prefix}eh_proj.weight"] = torch.randn(32, 64, generator=generator)
        config[COUNT_KEY[model_type]] = 1
        return tensors | extra

    save_tiny(build_tiny(model_type), directory)
    return rewrite_tiny(directory, add)


def mtp_names(directory: Path, model_type: str) -> list[str]:
    prefix = MTP_BLOCK[model_type].removesuffix("mlp")
    return [name for name in load_file(directory / "model.safetensors") if name.startswith(prefix)]


@pytest.mark.parametrize("model_type", sorted(KEPT))
def test_sliced_layers_have_the_same_count_and_the_rule_chooses(model_type: str, tmp_path: Path) -> None:
    source = save_with_mtp(tmp_path / "a", model_type)
    layout, plan = prune_to(source, tmp_path / "b", KEPT[model_type])
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    block = MTP_BLOCK[model_type]
    (cut,) = plan.mtp_layers
    assert cut.name == block
    gate = after[f"{block}.gate.weight"]
    assert gate.shape == (6, 32)
    assert torch.equal(gate, before[f"{block}.gate.weight"][list(cut.keep)])
    assert f"{block}.experts.5.up_proj.weight" in after
    assert f"{block}.experts.6.up_proj.weight" not in after
    assert any("rule that uses no data" in warning for warning in plan.warnings)
    verify_files(layout, plan, tmp_path / "b")


def test_the_most_biased_experts_go_group_by_group(tmp_path: Path) -> None:
    """Load balancing raises the bias of seldom used experts, so the largest biases are dropped in each group."""
    source = save_with_mtp(tmp_path / "a", "deepseek_v3")
    _, plan = prune_to(source, tmp_path / "b", KEPT["deepseek_v3"])
    bias = load_file(source / "model.safetensors")["model.layers.3.mlp.gate.e_score_correction_bias"].numpy()
    assert plan.mtp_layers[0].drop == (int(np.argmax(bias[:4])), 4 + int(np.argmax(bias[4:])))


def test_without_a_bias_the_shortest_router_rows_go(tmp_path: Path) -> None:
    source = save_with_mtp(tmp_path / "a", "qwen3_next")
    layout, plan = prune_to(source, tmp_path / "b", KEPT["qwen3_next"])
    rows = load_file(source / "model.safetensors")["mtp.layers.0.mlp.gate.weight"].double().norm(dim=1).numpy()
    np.testing.assert_allclose(data_free_scores(layout, layout.mtp_layers[0]), rows)
    assert plan.mtp_layers[0].drop == tuple(sorted(np.argsort(rows)[:2].tolist()))


@pytest.mark.parametrize("model_type", sorted(KEPT))
def test_dropped_layers_leave_no_tensor_and_no_count(model_type: str, tmp_path: Path) -> None:
    source = save_with_mtp(tmp_path / "a", model_type)
    layout, plan = prune_to(source, tmp_path / "b", KEPT[model_type], mtp="drop")
    assert mtp_names(source, model_type)
    assert not mtp_names(tmp_path / "b", model_type)
    assert json.loads((tmp_path / "b" / "config.json").read_text())[COUNT_KEY[model_type]] == 0
    stored = sum(t.numel() for t in load_file(tmp_path / "b" / "model.safetensors").values())
    assert stored == plan.amounts.parameters_after
    verify_files(layout, plan, tmp_path / "b")


@pytest.mark.parametrize("model_type", sorted(KEPT))
def test_kept_layers_are_copied_with_a_warning(model_type: str, tmp_path: Path) -> None:
    source = save_with_mtp(tmp_path / "a", model_type)
    layout, plan = prune_to(source, tmp_path / "b", KEPT[model_type], mtp="keep")
    assert mtp_names(tmp_path / "b", model_type) == mtp_names(source, model_type)
    assert any("keep 8 experts" in warning for warning in plan.warnings)
    verify_files(layout, plan, tmp_path / "b")


@pytest.mark.parametrize("policy", ["slice", "drop", "keep"])
def test_the_model_itself_does_not_depend_on_the_policy(policy: str, tmp_path: Path) -> None:
    source = save_with_mtp(tmp_path / "a", "glm4_moe")
    layout, plan = prune_to(source, tmp_path / "b", KEPT["glm4_moe"], mtp=policy)
    pruned, info = load_tiny(tmp_path / "b", "glm4_moe")
    assert not info["missing_keys"]
    assert all(key.startswith("model.layers.3.") for key in info["unexpected_keys"])
    model, _ = load_tiny(source, "glm4_moe")
    tokens = probe_tokens()
    assert (masked_logits(model, tokens, KEPT["glm4_moe"]) - logits(pruned, tokens)).abs().max() < 1e-5
    for level in ("block", "logits"):
        assert verify_pruned(layout, plan, tmp_path / "b", level).largest_difference < 1e-5


def test_the_policy_can_be_changed_when_a_plan_is_applied(tmp_path: Path) -> None:
    source = save_with_mtp(tmp_path / "a", "glm4_moe")
    layout, plan = prune_to(source, tmp_path / "b", KEPT["glm4_moe"], mtp="drop")
    apply_plan(source, tmp_path / "c", plan, mtp="slice")
    assert load_file(tmp_path / "c" / "model.safetensors")["model.layers.3.mlp.gate.weight"].shape == (6, 32)
    assert check_plan(plan, layout) == plan
    assert sniff_layout(tmp_path / "c").mtp_layers[0].num_experts == 6
