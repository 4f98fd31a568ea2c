"""Group-limited routers (DeepSeek): balanced cuts are exact, everything else is refused or padded exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.prune_cases import prune_to, scores_keeping
from support.tiny_moe import TINY, build_tiny, load_tiny, logits, masked_logits, probe_tokens, save_tiny

from xmac_cli.cli.errors import ConstraintError
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.plan import make_plan, with_keep
from xmac_cli.prune_moe.surgery import apply_plan

GROUPED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "axk1": {"n_group": 2, "topk_group": 1},
    "bailing_hybrid": {"num_expert_group": 2, "topk_group": 1},
}
BALANCED = {1: [0, 1, 3, 4, 5, 7], 2: [1, 2, 3, 5, 6, 7]}
UNBALANCED = {1: [0, 1, 2, 3, 4, 5], 2: [0, 1, 4, 5, 6, 7]}


def difference(source: Any, result: Path, model_type: str, kept: dict[int, list[int]]) -> float:
    pruned, info = load_tiny(result, model_type)
    assert not any(info.values())
    tokens = probe_tokens()
    return float((masked_logits(source, tokens, kept) - logits(pruned, tokens)).abs().max())


@pytest.mark.parametrize("model_type", sorted(GROUPED))
def test_the_same_number_in_each_group_is_exact(model_type: str, tmp_path: Path) -> None:
    model = build_tiny(model_type, **GROUPED[model_type])
    source = save_tiny(model, tmp_path / "a")
    layout, _ = prune_to(source, tmp_path / "b", BALANCED)
    assert (layout.n_group, layout.topk_group) == (2, 1)
    assert difference(model, tmp_path / "b", model_type, BALANCED) < 1e-5


@pytest.mark.parametrize("model_type", sorted(GROUPED))
def test_an_unbalanced_cut_is_refused(model_type: str, tmp_path: Path) -> None:
    layout = sniff_layout(save_tiny(build_tiny(model_type, **GROUPED[model_type]), tmp_path / "a"))
    plan = make_plan(layout, scores_keeping(layout, BALANCED), Budget.of(keep=6))
    with pytest.raises(ConstraintError, match=r"it keeps \[4, 2\] per group"):
        with_keep(plan, layout, UNBALANCED)


def test_an_unbalanced_cut_would_be_wrong(tmp_path: Path) -> None:
    """Why it is refused: with the same files but contiguous groups of three, the router groups other experts."""
    model = build_tiny("deepseek_v3", n_group=1, topk_group=1)
    source = save_tiny(model, tmp_path / "a")
    prune_to(source, tmp_path / "b", UNBALANCED)
    path = tmp_path / "b" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_group": 2, "topk_group": 1}))
    grouped = build_tiny("deepseek_v3", n_group=2, topk_group=1)
    grouped.load_state_dict(model.state_dict())
    assert difference(grouped, tmp_path / "b", "deepseek_v3", UNBALANCED) > 1e-2


@pytest.mark.parametrize("model_type", ["deepseek_v3", "axk1", "bailing_hybrid"])
def test_padding_makes_an_unbalanced_cut_exact(model_type: str, tmp_path: Path) -> None:
    model = build_tiny(model_type, **GROUPED[model_type])
    source = save_tiny(model, tmp_path / "a")
    kept = {1: [0, 1, 2, 4, 5], 2: [1, 3, 5, 6, 7]}
    layout = sniff_layout(source)
    plan = make_plan(layout, scores_keeping(layout, kept), Budget.of(keep=5), export="pad")
    assert {layer.layer: list(layer.keep) for layer in plan.layers} == kept
    assert plan.n_after == 6
    apply_plan(source, tmp_path / "b", plan)
    assert difference(model, tmp_path / "b", model_type, kept) < 1e-5


def test_groups_that_are_not_used_do_not_bind(tmp_path: Path) -> None:
    """DeepSeek-V2 with `topk_method: greedy` ignores its groups, so any cut is exact."""
    model = build_tiny("deepseek_v2", n_group=2, topk_group=1, topk_method="greedy")
    source = save_tiny(model, tmp_path / "a")
    layout, _ = prune_to(source, tmp_path / "b", UNBALANCED)
    assert layout.n_group == 1
    assert difference(model, tmp_path / "b", "deepseek_v2", UNBALANCED) < 1e-5


@pytest.mark.parametrize(
    ("keep", "options", "message"),
    [
        (5, {}, "n_group = 2"),
        (2, {}, "groups of at least 2"),
        (4, {"top_k": 3}, "groups of at least 3"),
    ],
)
def test_counts_that_crash_or_select_garbage_are_refused(
    keep: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    layout = sniff_layout(save_tiny(build_tiny("deepseek_v3", **options), tmp_path / "a"))
    everything = {layer: range(8) for layer in TINY["deepseek_v3"].moe_layers}
    with pytest.raises(ConstraintError, match=message) as caught:
        make_plan(layout, scores_keeping(layout, everything), Budget.of(keep=keep))
    assert caught.value.exit_code == 4


def test_one_expert_in_each_group_crashes_the_router() -> None:
    """Why two are required: a group is scored by its two best experts."""
    with pytest.raises(RuntimeError, match="out of range"), torch.no_grad():
        build_tiny("deepseek_v3", num_experts=2, n_group=2, topk_group=2)(input_ids=probe_tokens())
