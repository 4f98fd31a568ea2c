"""The reconstruction game against the block's own output in float64, and its bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tiny_moe import TINY, build_tiny, probe_tokens
from support.token_batches import token_batch

from xmac_cli.cli.errors import UnsupportedModelError, UsageError
from xmac_cli.prune_moe.calibration_pass import LayerStatistics, calibrate, forward
from xmac_cli.prune_moe.expert_outputs import all_expert_outputs
from xmac_cli.prune_moe.gates import GateFormula
from xmac_cli.prune_moe.recon import ReconGame, ReconLayer
from xmac_cli.prune_moe.routing import masked_routing, moe_modules
from xmac_cli.prune_moe.shapley import estimate_shapley, exact_shapley

LENGTHS = [12, 12, 9]
# A.X-K1 normalises the block's output, llama4's wrapper cannot run on text alone; their language models are covered.
MODEL_TYPES = [model_type for model_type in TINY if model_type not in ("axk1", "llama4")]
GROUPED = {"deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}}


def statistics_of(model, batch) -> list[LayerStatistics]:
    return calibrate(model, batch, moe_modules(model), keep_inputs=True)


def block_values(model, batch, entry, masks: np.ndarray) -> np.ndarray:
    """v(S) from the block itself: 1 - |Y_S - Y_N|^2 / |Y_empty - Y_N|^2 over real tokens."""
    inputs: list[tuple] = []
    hook = entry.block.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        forward(model, batch.input_ids, batch.attention_mask, logits=False)
    hook.remove()
    args, kwargs = inputs[0]

    def output(mask: np.ndarray) -> torch.Tensor:
        with torch.no_grad(), masked_routing(model, {entry.name: mask}):
            result = entry.block(*args, **kwargs)
        result = result[0] if isinstance(result, tuple) else result
        return result.reshape(-1, result.shape[-1])[batch.attention_mask.reshape(-1)].double()

    full = output(np.ones(entry.num_experts, dtype=bool))
    energy = (output(np.zeros(entry.num_experts, dtype=bool)) - full).square().sum()
    return np.array([1 - float((output(mask) - full).square().sum() / energy) for mask in masks])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_values_are_those_of_the_block_s_own_output(model_type: str):
    model, batch = build_tiny(model_type), token_batch(probe_tokens(), LENGTHS)
    layer = ReconLayer(statistics_of(model, batch)[-1])
    rng = np.random.default_rng(0)
    masks = np.stack([rng.random(layer.entry.num_experts) < share for share in (0.8, 0.6, 0.4, 0.2)])
    np.testing.assert_allclose(layer.values(masks), block_values(model, batch, layer.entry, masks), atol=2e-6)


@pytest.mark.parametrize("model_type", GROUPED)
def test_group_limited_routers(model_type: str):
    model, batch = build_tiny(model_type, **GROUPED[model_type]), token_batch(probe_tokens(), LENGTHS)
    layer = ReconLayer(statistics_of(model, batch)[-1])
    masks = np.random.default_rng(0).random((4, 8)) < 0.6
    np.testing.assert_allclose(layer.values(masks), block_values(model, batch, layer.entry, masks), atol=2e-6)


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "phimoe", "deepseek_v3"])
def test_everybody_is_worth_one_and_nobody_nothing(model_type: str):
    model, batch = build_tiny(model_type), token_batch(probe_tokens(), LENGTHS)
    for statistics in statistics_of(model, batch):
        layer = ReconLayer(statistics)
        values = layer.values(np.stack([np.ones(8, dtype=bool), np.zeros(8, dtype=bool)]))
        np.testing.assert_allclose(values, [1.0, 0.0], atol=1e-9)


def test_padding_is_no_token():
    model = build_tiny("mixtral")
    padded = statistics_of(model, token_batch(probe_tokens(), LENGTHS))
    assert [ReconLayer(layer).tokens for layer in padded] == [sum(LENGTHS)] * 3


def test_layers_whose_gram_matrices_do_not_fit_give_the_same_values():
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    statistics = statistics_of(model, batch)[1]
    masks = np.random.default_rng(0).random((5, 8)) < 0.5
    kept, rebuilt = ReconLayer(statistics), ReconLayer(statistics, table_bytes=0)
    np.testing.assert_array_equal(kept.values(masks), rebuilt.values(masks))


def energies(statistics: list[LayerStatistics]) -> np.ndarray:
    """sum_t |Y_N|^2 per layer, from outputs and gates rather than Gram matrices."""
    found = []
    for layer in statistics:
        hidden, logits = torch.cat(layer.inputs), torch.cat(layer.logits)
        outputs = all_expert_outputs(layer.entry, hidden, logits).detach().double()
        top = logits.double().topk(2, dim=1)
        chosen = outputs.gather(1, top.indices[:, :, None].expand(-1, -1, outputs.shape[2]))
        found.append(float((chosen * torch.softmax(top.values, dim=1)[:, :, None]).sum(dim=1).square().sum()))
    return np.array(found)


def test_the_global_value_is_the_same_formula_on_all_layers_side_by_side():
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    statistics = statistics_of(model, batch)
    game = ReconGame([ReconLayer(layer) for layer in statistics])
    masks = np.random.default_rng(0).random((6, 24)) < 0.6
    energy = energies(statistics)
    lost = [
        energy[i] * (1 - ReconLayer(layer).values(masks[:, 8 * i : 8 * i + 8])) for i, layer in enumerate(statistics)
    ]
    np.testing.assert_allclose(game.values(masks), 1 - np.sum(lost, axis=0) / energy.sum(), rtol=1e-6)


def test_global_shapley_values_are_those_of_the_layers_times_their_energy():
    """Linearity: checked by walking permutations of all 24 players, not by the formula."""
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    statistics = statistics_of(model, batch)
    game = ReconGame([ReconLayer(layer) for layer in statistics])
    walked = estimate_shapley(
        None, 24, permutations=600, truncate=0, sampler="antithetic", value_fn_batch=game.values, batch=600
    )
    weight = energies(statistics) / energies(statistics).sum()
    exact = np.concatenate(
        [
            w * exact_shapley(None, 8, value_fn_batch=ReconLayer(layer).values).phi
            for w, layer in zip(weight, statistics)
        ]
    )
    assert (np.abs(walked.phi - exact) < 5 * walked.se + 1e-6).all()
    assert np.abs(walked.phi - exact).max() < 0.02


def test_prefetching_leaves_nothing_to_evaluate():
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    layers = [ReconLayer(layer) for layer in statistics_of(model, batch)]
    game = ReconGame(layers)
    orders = np.stack([np.random.default_rng(m).permutation(24) for m in range(4)])
    game.prefetch(orders)
    before = [layer.evaluations for layer in layers]
    masks = np.ones((4, 24), dtype=bool)
    for step in range(24):
        masks[np.arange(4), orders[:, step]] = False
        game.values(masks)
    assert [layer.evaluations for layer in layers] == before


def test_a_backend_that_does_not_exist_is_a_usage_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch):
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    layer = ReconLayer(statistics_of(model, batch)[0])
    monkeypatch.setenv("XMAC_BACKEND", "abacus")
    with pytest.raises(UsageError, match="abacus") as caught:
        layer.values(np.ones((1, layer.entry.num_experts), dtype=bool))
    assert caught.value.hint is not None and "XMAC_BACKEND" in caught.value.hint


def test_a_router_that_does_not_follow_its_family_s_formula_is_refused(monkeypatch: pytest.MonkeyPatch):
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    statistics = statistics_of(model, batch)[0]
    wrong = GateFormula("sigmoid", 2, "none")
    monkeypatch.setattr("xmac_cli.prune_moe.recon.gate_formula", lambda entry: wrong)
    with pytest.raises(UnsupportedModelError, match="does not follow the gate formula"):
        ReconLayer(statistics)


def test_a_bfloat16_model_can_be_scored():
    """Its logits tie now and then; values stay close to those of the float32 model."""
    batch = token_batch(probe_tokens(batch=8))
    values = []
    masks = np.random.default_rng(0).random((6, 8)) < 0.7
    for dtype in (torch.float32, torch.bfloat16):
        model = build_tiny("mixtral", dtype=dtype)
        model.set_experts_implementation("eager")
        values.append(ReconLayer(statistics_of(model, batch)[0]).values(masks))
    np.testing.assert_allclose(values[0], values[1], atol=0.05)


def test_backends_agree_on_a_real_layer():
    model, batch = build_tiny("qwen2_moe"), token_batch(probe_tokens(), LENGTHS)
    statistics = statistics_of(model, batch)[0]
    masks = np.random.default_rng(0).random((20, 8)) < 0.5
    values = [ReconLayer(statistics, backend=backend).values(masks) for backend in ("numba", "torch")]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9, atol=1e-12)
