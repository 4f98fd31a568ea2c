"""Different numbers of experts per layer, stored by padding: exact where the router can disable an empty slot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.masked_reference import reference_masking
from support.prune_cases import mixtral_config, read_all, scores_keeping, scores_of, write_files
from support.tiny_moe import TINY, build_tiny, load_tiny, logits, masked_logits, probe_tokens, save_tiny

from xmac_cli.cli.errors import ConstraintError
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.families import find_family
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.plan import make_plan, with_keep
from xmac_cli.prune_moe.surgery import apply_plan
from xmac_cli.prune_moe.verify_files import verify_files

PADDABLE = sorted(t for t in TINY if (family := find_family(t)) is not None and family.paddable)
# Both groups of DeepSeek's routers keep at least two experts here.
UNEQUAL = ([1, 2, 5, 6, 7], [0, 3, 4, 6], [0, 1, 3, 4, 5, 7])


def prune_unequally(source: Path, result: Path, layers: tuple[int, ...]) -> tuple[dict[int, list[int]], int]:
    layout = sniff_layout(source)
    kept = dict(zip(layers, UNEQUAL))
    first = make_plan(layout, scores_keeping(layout, kept), Budget.of(keep=6), export="pad")
    plan = with_keep(first, layout, kept)
    assert apply_plan(source, result, plan)
    verify_files(layout, plan, result)
    return kept, plan.n_after


def test_paddable_families_have_a_selection_bias_on_independent_scores() -> None:
    assert {"deepseek_v3", "glm4_moe", "exaone_moe", "minimax_m2", "lfm2_moe", "gpt_oss"} <= set(PADDABLE)
    assert not {"mixtral", "qwen3_moe", "olmoe", "llama4", "granitemoe", "jamba", "dbrx", "phimoe"} & set(PADDABLE)


@pytest.mark.parametrize("model_type", PADDABLE)
def test_padded_files_compute_the_masked_original(model_type: str, tmp_path: Path) -> None:
    model = build_tiny(model_type)
    tokens = probe_tokens()
    source = save_tiny(model, tmp_path / "a", fused=model_type in ("glm4_moe", "exaone_moe"))
    kept, stored = prune_unequally(source, tmp_path / "b", TINY[model_type].moe_layers)
    pruned, info = load_tiny(tmp_path / "b", model_type)
    assert not any(info.values())
    assert stored == (8 if sniff_layout(source).n_group > 1 else 6)
    assert (masked_logits(model, tokens, kept) - logits(pruned, tokens)).abs().max() < 1e-5


def test_a_softmax_over_all_logits_cannot_be_padded(tmp_path: Path) -> None:
    """ERNIE adds its bias to softmax scores. A zero router row takes probability from every expert, so with the same
    bias other experts win: padding would be wrong, and is refused."""
    model = build_tiny("ernie4_5_moe")
    layout = sniff_layout(save_tiny(model, tmp_path / "a"))
    with pytest.raises(ConstraintError, match="changes the choice"):
        make_plan(layout, scores_keeping(layout, {1: range(6), 2: range(6)}), Budget.of(keep=6), export="pad")

    router = model.model.layers[1].mlp.gate
    hidden = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), reference_masking(model, {1: [0, 1, 2, 3, 4, 5]}):
        masked = router(hidden)[2].sort(dim=1).values
    with torch.no_grad():
        router.weight[6:] = 0
        router.moe_statics.e_score_correction_bias[:, 6:] = -1e9
        padded = router(hidden)[2].sort(dim=1).values
    assert (masked != padded).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_empty_slots_are_never_chosen_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_tiny(build_tiny("minimax_m2", dtype=dtype), tmp_path / "a")
    kept, _ = prune_unequally(source, tmp_path / "b", (0, 1, 2))
    model, _ = load_tiny(source, "minimax_m2")
    pruned, info = load_tiny(tmp_path / "b", "minimax_m2")
    assert not any(info.values())
    tokens = probe_tokens()
    assert (masked_logits(model, tokens, kept) - logits(pruned, tokens)).abs().max() < 1e-5


def test_an_empty_slot_holds_zeros_and_a_finite_bias(tmp_path: Path) -> None:
    source = save_tiny(build_tiny("minimax_m2"), tmp_path / "a")
    prune_unequally(source, tmp_path / "b", (0, 1, 2))
    tensors = read_all(tmp_path / "b")
    block = "model.layers.1.block_sparse_moe"
    for slot in (4, 5):
        for matrix in ("w1", "w2", "w3"):
            assert not tensors[f"{block}.experts.{slot}.{matrix}.weight"].any()
        assert not tensors[f"{block}.gate.weight"][slot].any()
    bias = tensors[f"{block}.e_score_correction_bias"]
    assert np.isfinite(bias).all()
    np.testing.assert_array_equal(bias[4:], np.full(2, -1e9, np.float32))
    assert (bias[:4] > -10).all()


def test_real_and_stored_parameters_are_told_apart(tmp_path: Path) -> None:
    source = save_tiny(build_tiny("minimax_m2"), tmp_path / "a")
    layout = sniff_layout(source)
    kept = dict(zip((0, 1, 2), UNEQUAL))
    plan = with_keep(make_plan(layout, scores_keeping(layout, kept), Budget.of(keep=6), export="pad"), layout, kept)
    apply_plan(source, tmp_path / "b", plan)
    stored = sum(tensor.size for tensor in read_all(tmp_path / "b").values())
    per_expert = 3 * 32 * 40 + 32 + 1
    assert stored == plan.amounts.parameters_after
    assert stored - plan.amounts.real_parameters == 3 * per_expert


def test_an_empty_slot_of_a_packed_checkpoint_keeps_what_describes_its_format(tmp_path: Path) -> None:
    """A zero `weight_shape` or `g_idx` would make the file unreadable; the packed weights themselves are zeros."""
    tensors: dict[str, np.ndarray] = {}
    for layer in (0, 1):
        block = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{block}.gate.weight"] = np.ones((8, 16), np.float32)
        tensors[f"{block}.e_score_correction_bias"] = np.zeros(8, np.float32)
        for expert in range(8):
            tensors[f"{block}.experts.{expert}.w1.weight_packed"] = np.full((8, 2), 7 + expert, np.int32)
            tensors[f"{block}.experts.{expert}.w1.weight_scale"] = np.ones((8, 1), np.float16)
            tensors[f"{block}.experts.{expert}.w1.weight_shape"] = np.array([8, 16], np.int64)
    source = write_files(tmp_path / "a", mixtral_config(8) | {"model_type": "minimax_m2"}, tensors)
    layout = sniff_layout(source)
    plan = make_plan(layout, scores_of(layout, {0: range(8), 1: range(8, 16)}), Budget.of(keep=6), allocation="global")
    assert [len(layer.keep) for layer in plan.layers] == [4, 8]
    apply_plan(source, tmp_path / "b", plan)
    verify_files(layout, plan, tmp_path / "b")
    slot = "model.layers.0.block_sparse_moe.experts.7.w1"
    written = read_all(tmp_path / "b")
    assert not written[f"{slot}.weight_packed"].any()
    assert written[f"{slot}.weight_shape"].tolist() == [8, 16]
