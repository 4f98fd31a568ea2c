"""Baselines against their definitions, recomputed token by token from the weights of a tiny Mixtral."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from support.tiny_moe import build_tiny, probe_tokens
from support.token_batches import token_batch
from torch.nn import functional as F

from xmac_cli.cli.errors import ConstraintError
from xmac_cli.prune_moe.baselines import (
    greedy_scores,
    leave_one_out_scores,
    naee_scores,
    random_scores,
    statistic_scores,
)
from xmac_cli.prune_moe.calibration_pass import calibrate, forward
from xmac_cli.prune_moe.expert_outputs import all_expert_outputs
from xmac_cli.prune_moe.options import STATISTIC_CRITERIA
from xmac_cli.prune_moe.recon import ReconLayer
from xmac_cli.prune_moe.routing import masked_routing, moe_modules

LENGTHS = [12, 12, 9]
LAYER = 1


@pytest.fixture(scope="module")
def case():
    model, batch = build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)
    return model, batch, calibrate(model, batch, moe_modules(model), keep_inputs=True)


def by_hand(model, batch) -> dict[str, np.ndarray]:
    """All criteria of one layer, with Python loops over tokens and experts."""
    block = model.model.layers[LAYER].mlp
    seen: list[torch.Tensor] = []
    hook = block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        forward(model, batch.input_ids, batch.attention_mask, logits=False)
    hook.remove()
    hidden = seen[0].reshape(-1, seen[0].shape[-1])[batch.attention_mask.reshape(-1)].double()
    weight = block.gate.weight.detach().double()
    sums = {name: np.zeros(8) for name in ("count", "gate", "trim", "ean", "reap", "norm2")}
    for x in hidden:
        probabilities = torch.softmax(weight @ x, dim=0)
        top = probabilities.topk(2)
        gates = top.values / top.values.sum()
        sums["gate"] += probabilities.numpy()
        for gate, expert in zip(gates.tolist(), top.indices.tolist()):
            a, b = (block.experts.gate_up_proj[expert].detach().double() @ x).chunk(2)
            norm = float((block.experts.down_proj[expert].detach().double() @ (F.silu(a) * b)).norm())
            for name, value in (("count", 1), ("trim", gate), ("ean", norm), ("reap", gate * norm), ("norm2", norm**2)):
                sums[name][expert] += value
    tokens, used = len(hidden), np.maximum(sums["count"], 1)
    return {
        "frequency": sums["count"],
        "gate": sums["gate"] / tokens,
        "expert-trim": sums["trim"] / tokens,
        "ean": sums["ean"],
        "reap": sums["reap"] / used,
        "man": sums["ean"] / used,
        "msan": sums["norm2"] / used,
    }


def test_every_statistic_follows_its_definition(case):
    model, batch, statistics = case
    want = by_hand(model, batch)
    assert set(want) == set(STATISTIC_CRITERIA)
    for criterion, values in want.items():
        np.testing.assert_allclose(statistic_scores(criterion, statistics[LAYER]), values, rtol=1e-5, err_msg=criterion)


def test_sigmoid_routers_are_scored_by_their_own_gates():
    """DeepSeek-V3: gates are sigmoid scores over their sum, times 2.5; a second softmax would give something else."""
    model, batch = build_tiny("deepseek_v3"), token_batch(probe_tokens(), LENGTHS)
    entry = moe_modules(model)[0]
    statistics = calibrate(model, batch, moe_modules(model))[0]
    scale = entry.router.routed_scaling_factor
    assert statistics.gate_mass / statistics.tokens == pytest.approx(scale, rel=1e-5)
    assert statistics.gate.sum() == pytest.approx(scale * statistics.tokens, rel=1e-5)


def test_a_constant_factor_behind_the_experts_counts_as_gate():
    model, batch = build_tiny("laguna", moe_routed_scaling_factor=3.0), token_batch(probe_tokens())
    plain = build_tiny("laguna", moe_routed_scaling_factor=1.0)
    scaled = calibrate(model, batch, moe_modules(model))[0]
    unscaled = calibrate(plain, batch, moe_modules(plain))[0]
    np.testing.assert_allclose(scaled.gate, 3 * unscaled.gate, rtol=1e-5)
    np.testing.assert_allclose(scaled.gated_norm, 3 * unscaled.gated_norm, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text", "nemotron_h", "dbrx", "granitemoe"])
def test_gated_expert_outputs_add_up_to_the_block(model_type: str):
    model, batch = build_tiny(model_type), token_batch(probe_tokens())
    entry = moe_modules(model)[-1]
    calls, outputs, inputs = [], [], []
    hook = entry.block.register_forward_hook(
        lambda module, args, kwargs, output: outputs.append(output), with_kwargs=True
    )
    keep = entry.block.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad(), masked_routing(model, observe=lambda call: calls.append(call)):
        forward(model, batch.input_ids, batch.attention_mask)
        keep.remove()
        hook.remove()
    call = next(call for call in calls if call.module.name == entry.name)
    none = np.zeros(entry.num_experts, dtype=bool)
    with torch.no_grad(), masked_routing(model, {entry.name: none}):
        shared = entry.block(*inputs[0][0], **inputs[0][1])
    full, shared = (x[0] if isinstance(x, tuple) else x for x in (outputs[0], shared))
    routed = (full - shared).reshape(-1, full.shape[-1])
    with torch.no_grad():
        each = all_expert_outputs(entry, call.hidden, call.logits)
    gates = torch.ones_like(call.gates) if entry.gate_on_input else call.gates
    added = (each.gather(1, call.index[:, :, None].expand(-1, -1, each.shape[-1])) * gates[:, :, None]).sum(dim=1)
    assert (added - routed).abs().max() < 1e-5


def test_the_largest_activation_is_the_largest_entry_of_an_expert_s_output(case):
    _, _, statistics = case
    layer = statistics[LAYER]
    hidden, logits = torch.cat(layer.inputs), torch.cat(layer.logits)
    outputs = all_expert_outputs(layer.entry, hidden, logits).detach()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(2, dim=1).indices, True)
    want = outputs.abs().amax(dim=2).masked_fill(~chosen, 0).amax(dim=0)
    np.testing.assert_allclose(layer.max_activation, want.numpy(), rtol=1e-5)


def test_statistics_do_not_depend_on_how_sequences_share_a_forward_pass(case):
    model, batch, statistics = case
    split = calibrate(model, batch, moe_modules(model), batch_tokens=12)
    np.testing.assert_array_equal(split[LAYER].count, statistics[LAYER].count)
    np.testing.assert_allclose(split[LAYER].gated_norm, statistics[LAYER].gated_norm, rtol=1e-5)


def test_gate_mass_of_plain_softmax_routers_grows_when_experts_leave():
    model, batch = build_tiny("olmoe"), token_batch(probe_tokens())
    modules = moe_modules(model)
    full = calibrate(model, batch, modules, norms=False)
    half = {entry.name: np.arange(8) % 2 == 0 for entry in modules}
    fewer = calibrate(model, batch, modules, kept=half, norms=False)
    assert all(b.gate_mass > a.gate_mass for a, b in zip(full, fewer))
    assert all((b.count[1::2] == 0).all() for b in fewer)


def test_leave_one_out_is_a_difference_of_two_values():
    class Game:
        num_players = 3

        def values(self, masks: np.ndarray) -> np.ndarray:
            return masks @ np.array([1.0, 2.0, 4.0]) + 10.0 * (masks[:, 0] & masks[:, 2])

    np.testing.assert_allclose(leave_one_out_scores(Game()), [11.0, 2.0, 14.0])


def frobenius(layer: ReconLayer, statistics, kept: tuple[int, ...]) -> float:
    """|Z - Z_S|_F of NAEE from expert outputs, in float64."""
    hidden, logits = torch.cat(statistics.inputs), torch.cat(statistics.logits)
    outputs = all_expert_outputs(layer.entry, hidden, logits).detach().double()

    def mixed(ids: list[int]) -> torch.Tensor:
        top = logits[:, ids].double().topk(2, dim=1)
        chosen = torch.tensor(ids)[top.indices]
        gates = torch.softmax(top.values, dim=1)
        return (outputs.gather(1, chosen[:, :, None].expand(-1, -1, outputs.shape[2])) * gates[:, :, None]).sum(dim=1)

    return float((mixed(list(range(8))) - mixed(list(kept))).norm())


@pytest.mark.parametrize("keep", [2, 4, 6])
def test_naee_finds_the_best_of_all_subsets(case, keep: int):
    statistics = case[2][LAYER]
    layer = ReconLayer(statistics)
    errors = {kept: frobenius(layer, statistics, kept) for kept in combinations(range(8), keep)}
    phi = naee_scores(layer, keep)
    assert tuple(np.flatnonzero(phi)) == min(errors, key=errors.get)
    assert set(phi) == {0.0, 1.0}


def test_naee_keeps_groups_balanced():
    model, batch = build_tiny("deepseek_v3"), token_batch(probe_tokens())
    layer = ReconLayer(calibrate(model, batch, moe_modules(model), keep_inputs=True)[0])
    phi = naee_scores(layer, 6)
    assert phi[:4].sum() == phi[4:].sum() == 3
    with pytest.raises(ConstraintError):
        naee_scores(layer, 5)


def test_naee_refuses_what_it_cannot_enumerate(case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("xmac_cli.prune_moe.baselines.NAEE_LIMIT", 69)
    with pytest.raises(ConstraintError, match="70 subsets"):
        naee_scores(ReconLayer(case[2][LAYER]), 4)


def test_greedy_removes_the_least_missed_expert_first(case):
    statistics = case[2][LAYER]
    layer = ReconLayer(statistics)
    phi = greedy_scores(layer)
    assert sorted(phi) == list(range(8))
    left = list(range(8))
    for step in range(6):
        errors = {out: frobenius(layer, statistics, tuple(e for e in left if e != out)) for out in left}
        loser = min(errors, key=errors.get)
        assert phi[loser] == step
        left.remove(loser)


def test_random_scores_repeat_by_seed():
    first, again, other = (random_scores([4, 4], seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
