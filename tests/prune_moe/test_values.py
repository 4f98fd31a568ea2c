"""Values of coalitions against losses computed by hand from the logits of a model masked by other means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tiny_moe import build_tiny, masked_logits, probe_tokens
from support.token_batches import token_batch
from torch.nn import functional as F

from xmac_cli.prune_moe.routing import moe_modules
from xmac_cli.prune_moe.values import ModelGame

LENGTHS = [12, 12, 9]


def hand_loss(model, tokens: torch.Tensor, kept: dict[int, list[int]]) -> float:
    """Mean next-token loss over real tokens, sequence by sequence without any padding."""
    losses = []
    for row, length in zip(tokens, LENGTHS):
        out = masked_logits(model, row[None, :length], kept)[0]
        losses.append(F.cross_entropy(out[:-1], row[1:length], reduction="none").double())
    return float(torch.cat(losses).mean())


def hand_kl(model, tokens: torch.Tensor, kept: dict[int, list[int]]) -> float:
    terms = []
    for row, length in zip(tokens, LENGTHS):
        p = F.log_softmax(masked_logits(model, row[None, :length], {})[0, :-1], dim=-1).double()
        q = F.log_softmax(masked_logits(model, row[None, :length], kept)[0, :-1], dim=-1).double()
        terms.append((p.exp() * (p - q)).sum(dim=-1))
    return float(torch.cat(terms).mean())


def kept_of(mask: np.ndarray, modules: list) -> dict[int, list[int]]:
    kept, start = {}, 0
    for entry in modules:
        kept[entry.layer] = np.flatnonzero(mask[start : start + entry.num_experts]).tolist()
        start += entry.num_experts
    return kept


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss"])
def case(request: pytest.FixtureRequest):
    model, tokens = build_tiny(request.param), probe_tokens()
    return model, tokens, token_batch(tokens, LENGTHS), moe_modules(model)


def coalitions(players: int, count: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, players)) < 0.6


def test_ppl_and_nll_are_the_loss_on_real_tokens(case):
    model, tokens, batch, modules = case
    game = ModelGame(model, batch, modules)
    masks = coalitions(game.num_players)
    want = np.array([hand_loss(model, tokens, kept_of(mask, modules)) for mask in masks])
    np.testing.assert_allclose(game.values(masks), np.exp(-want), rtol=1e-5)
    np.testing.assert_allclose(ModelGame(model, batch, modules, value="nll").values(masks), -want, rtol=1e-5)


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_kl_is_the_divergence_from_the_full_model(case, budget: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("xmac_cli.prune_moe.values.REFERENCE_BYTES", budget)  # 0: nothing is cached
    model, tokens, batch, modules = case
    game = ModelGame(model, batch, modules, value="kl")
    masks = coalitions(game.num_players, count=3)
    want = [-hand_kl(model, tokens, kept_of(mask, modules)) for mask in masks]
    np.testing.assert_allclose(game.values(masks), want, rtol=1e-4, atol=1e-6)
    assert game.values(np.ones((1, game.num_players), dtype=bool))[0] == pytest.approx(0.0, abs=1e-6)


def test_coalitions_that_share_a_forward_pass_get_the_values_they_get_alone(case):
    model, _, batch, modules = case
    masks = coalitions(sum(entry.num_experts for entry in modules), count=7)
    alone = [ModelGame(model, batch, modules, batch_tokens=12).values(mask[None])[0] for mask in masks]
    for batch_tokens in (36, 60, 10_000):
        together = ModelGame(model, batch, modules, batch_tokens=batch_tokens).values(masks)
        np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_what_padding_says_does_not_matter(case):
    model, tokens, batch, modules = case
    other = tokens.clone()
    other[2, LENGTHS[2] :] = 5
    masks = coalitions(sum(entry.num_experts for entry in modules))
    np.testing.assert_allclose(
        ModelGame(model, batch, modules).values(masks),
        ModelGame(model, token_batch(other, LENGTHS), modules).values(masks),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "qwen3_next", "deepseek_v32", "jamba", "nemotron_h", "phimoe", "dbrx", "granitemoehybrid", "hy_v4"],
)
@pytest.mark.parametrize("value", ["ppl", "kl"])
def test_a_layer_game_is_the_global_game_with_all_other_layers_intact(model_type: str, value: str):
    model, batch = build_tiny(model_type), token_batch(probe_tokens(), LENGTHS)
    modules = moe_modules(model)
    whole = ModelGame(model, batch, modules, value=value)
    start = 0
    for entry in modules:
        layer = ModelGame(model, batch, modules, value=value, layer=entry, batch_tokens=24)
        masks = coalitions(entry.num_experts, seed=entry.layer)
        everywhere = np.ones((len(masks), whole.num_players), dtype=bool)
        everywhere[:, start : start + entry.num_experts] = masks
        np.testing.assert_allclose(layer.values(masks), whole.values(everywhere), rtol=1e-5, atol=1e-6)
        start += entry.num_experts


def test_layers_in_front_of_a_layer_game_are_not_computed():
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    modules = moe_modules(model)
    game = ModelGame(model, batch, modules, layer=modules[2])
    computed: list[int] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda *_, index=index: computed.append(index))
        for index, layer in enumerate(model.model.layers)
    ]
    game.values(coalitions(8, count=1))
    for hook in hooks:
        hook.remove()
    assert computed == [2]


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe", "minimax_m2", "gpt_oss", "dots1", "llama4_text"])
def test_removing_an_inactive_expert_changes_nothing(model_type: str):
    model, batch = build_tiny(model_type, num_experts=16), token_batch(probe_tokens(batch=1))
    modules = moe_modules(model)
    game = ModelGame(model, batch, modules)
    tested = 0
    for mask in coalitions(game.num_players, count=4, seed=2):
        before = game.values(mask[None])[0]
        for player in np.flatnonzero(game.inactive(mask) & mask)[:4]:
            fewer = mask.copy()
            fewer[player] = False
            fresh = ModelGame(model, batch, modules)
            assert fresh.values(fewer[None])[0] == pytest.approx(before, rel=1e-6)
            tested += 1
    assert tested >= 3


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen2_moe", {}),
        ("olmoe", {}),
        ("deepseek_v2", {}),
        ("jamba", {}),
        ("phimoe", {}),
        ("deepseek_v3", {}),
        ("ernie4_5_moe", {}),
    ],
)
def test_no_expert_is_called_inactive_where_that_would_be_wrong(model_type: str, options: dict):
    model, batch = build_tiny(model_type, **options), token_batch(probe_tokens(batch=1))
    game = ModelGame(model, batch, moe_modules(model))
    full = np.ones(game.num_players, dtype=bool)
    game.values(full[None])
    assert not game.has_null_moves
    assert not game.inactive(full).any()


def test_a_softmax_router_with_a_selection_bias_drifts_when_an_unused_expert_leaves():
    """Why ERNIE has no null moves: probabilities of the others rise against their biases, and the choice can flip."""
    from xmac_cli.prune_moe.gates import GateFormula, masked_gates

    formula = GateFormula("softmax", 1, "topk", choose_by_logit=False, bias=torch.tensor([0.0, 0.25, 0.0]))
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.4 - 1e-3]]))
    full, _ = masked_gates(formula, logits, torch.tensor([True, True, True]))
    fewer, _ = masked_gates(formula, logits, torch.tensor([True, True, False]))
    assert full.item() == 1  # 0.2 + 0.25 beats 0.4: the third expert is unused
    assert fewer.item() == 0  # but without it, 0.67 beats 0.33 + 0.25


def test_the_oracle_knows_only_coalitions_that_were_evaluated():
    model, batch = build_tiny("mixtral", num_experts=16), token_batch(probe_tokens(batch=1))
    game = ModelGame(model, batch, moe_modules(model))
    assert not game.inactive(np.ones(game.num_players, dtype=bool)).any()


def test_the_full_value_is_that_of_the_model_and_the_empty_one_is_finite():
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens())
    game = ModelGame(model, batch, moe_modules(model), value="nll")
    empty, full = game.values(np.arange(2)[:, None].repeat(game.num_players, axis=1).astype(bool))
    assert full == pytest.approx(-hand_full(model, probe_tokens()), rel=1e-5)
    assert np.isfinite(empty)


def hand_full(model, tokens: torch.Tensor) -> float:
    out = masked_logits(model, tokens, {})
    return float(F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
