"""Masked routing of live models against references that share no code with it.

Three references: a mask on products with the router weight (support/masked_reference.py), the gate formulas of
gates.py in float64, and models whose expert tensors were physically cut.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support.tiny_moe import TINY, build_tiny, logits, masked_logits, probe_tokens

from xmac_cli.cli.errors import UnsupportedModelError, UsageError
from xmac_cli.prune_moe.gates import gate_formula, masked_gates
from xmac_cli.prune_moe.routing import RoutingCall, masked_routing, moe_modules, route_logits

MODEL_TYPES = list(TINY)
GROUPED = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "deepseek_v3": {"n_group": 4, "topk_group": 2},
}


def keep_ids(layers: list[int]) -> dict[int, list[int]]:
    """Four of eight experts, two of each half, another set in every layer."""
    choices = [[0, 3, 5, 6], [1, 2, 4, 7], [0, 2, 6, 7], [1, 3, 4, 5]]
    return {layer: choices[position % 4] for position, layer in enumerate(layers)}


def as_masks(modules: list, kept: dict[int, list[int]]) -> dict[str, np.ndarray]:
    return {entry.name: np.isin(np.arange(entry.num_experts), kept[entry.layer]) for entry in modules}


def dense(index: torch.Tensor, gates: torch.Tensor, n: int) -> torch.Tensor:
    return torch.zeros(index.shape[0], n, dtype=torch.float64).scatter_add_(1, index, gates.double())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_masked_logits_are_those_of_a_model_with_router_logits_at_minus_infinity(model_type: str):
    model, tokens = build_tiny(model_type), probe_tokens()
    modules = moe_modules(model)
    assert [entry.layer for entry in modules] == list(TINY[model_type].moe_layers)
    kept = keep_ids([entry.layer for entry in modules])
    before = logits(model, tokens)
    with masked_routing(model, as_masks(modules, kept)):
        masked = logits(model, tokens)
    assert (masked - masked_logits(model, tokens, kept)).abs().max() < 1e-6
    assert (masked - before).abs().max() > 1e-3
    assert torch.equal(logits(model, tokens), before)  # nothing is left behind


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_gates_follow_the_formula_down_to_an_empty_layer(model_type: str):
    model, tokens = build_tiny(model_type), probe_tokens()
    modules = moe_modules(model)
    rng = np.random.default_rng(0)
    for share in (1.0, 0.6, 0.3, 0.13, 0.0):
        masks = {entry.name: rng.random(entry.num_experts) < share for entry in modules}
        calls: list[RoutingCall] = []
        with masked_routing(model, masks, observe=calls.append):
            logits(model, tokens)
        assert len(calls) == len(modules)
        for call in calls:
            entry, present = call.module, torch.from_numpy(masks[call.module.name])
            gates = call.available.double() if entry.gate_on_input else call.gates
            got = dense(call.index, gates, entry.num_experts)
            assert (got[:, ~present] == 0).all()
            formula = gate_formula(entry)
            if formula is None:
                assert model_type == "phimoe"
                continue
            want = dense(*masked_gates(formula, call.logits, present), entry.num_experts)
            assert (got - want).abs().max() < 1e-6


def largest_gate_error(model: torch.nn.Module, tokens: torch.Tensor, masks: dict[str, np.ndarray]) -> float:
    """Largest |gate - gate by formula| over layers and tokens, in units of the formula's scale where that is > 1."""
    calls: list[RoutingCall] = []
    with masked_routing(model, masks, observe=calls.append):
        logits(model, tokens)
    assert len(calls) == len(masks)
    errors = []
    for call in calls:
        formula = gate_formula(call.module)
        assert formula is not None
        want = dense(*masked_gates(formula, call.logits, torch.from_numpy(masks[call.module.name])), 8)
        errors.append(float((dense(call.index, call.gates, 8) - want).abs().max()) / max(formula.scale, 1.0))
    return max(errors)


@pytest.mark.parametrize("model_type", GROUPED)
def test_group_limited_routers_follow_the_formula(model_type: str):
    model, tokens = build_tiny(model_type, **GROUPED[model_type]), probe_tokens()
    modules = moe_modules(model)
    assert modules[0].num_groups == GROUPED[model_type]["n_group"]
    rng = np.random.default_rng(1)
    for _ in range(8):
        masks = {entry.name: rng.random(entry.num_experts) < 0.5 for entry in modules}
        assert largest_gate_error(model, tokens, masks) < 1e-6


# Settings of a router that its config could also have: (model type, part of the block, attribute, value).
VARIANTS = [
    ("dbrx", "block", "moe_normalize_expert_weights", 2.0),
    ("dbrx", "block", "moe_normalize_expert_weights", None),
    ("qwen2_moe", "router", "norm_topk_prob", True),
    ("qwen3_moe", "router", "norm_topk_prob", False),
    ("cohere2_moe", "router", "expert_selection_fn", "sigmoid"),
    ("glm4_moe", "router", "norm_topk_prob", False),
    ("lfm2_moe", "router", "norm_topk_prob", False),
    ("deepseek_v2", "router", "routed_scaling_factor", 16.0),
]


@pytest.mark.parametrize(("model_type", "part", "attribute", "value"), VARIANTS)
def test_gates_follow_the_formula_for_every_setting_of_a_router(
    model_type: str, part: str, attribute: str, value: object
):
    model, tokens = build_tiny(model_type), probe_tokens()
    modules = moe_modules(model)
    for entry in modules:
        assert hasattr(getattr(entry, part), attribute)
        setattr(getattr(entry, part), attribute, value)
    masks = {entry.name: np.array([1, 0, 1, 1, 0, 1, 0, 1], dtype=bool) for entry in modules}
    assert largest_gate_error(model, tokens, masks) < 1e-6


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_without_survivors_the_block_is_its_shared_experts_alone(model_type: str):
    model, tokens = build_tiny(model_type), probe_tokens()
    entry = moe_modules(model)[-1]
    inputs: list[tuple] = []
    outputs: list[torch.Tensor] = []

    def record(module: torch.nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
        inputs.append((args, kwargs))
        outputs.append(output)

    hook = entry.block.register_forward_hook(record, with_kwargs=True)
    with masked_routing(model, {entry.name: np.zeros(entry.num_experts, dtype=bool)}):
        logits(model, tokens)
    hook.remove()
    silenced = copy.deepcopy(entry.block)
    with torch.no_grad():
        for name, parameter in silenced.experts.named_parameters():
            if "w2" in name or "down" in name:
                parameter.zero_()
        args, kwargs = inputs[0]
        want = silenced(*args, **kwargs)
    got, want = (x[0] if isinstance(x, tuple) else x for x in (outputs[0], want))
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() < 1e-6


def cut_experts(model: torch.nn.Module, kept: dict[int, list[int]]) -> torch.nn.Module:
    """A copy with fewer experts, by slicing every tensor of expert and router along its expert axis."""
    smaller = copy.deepcopy(model)
    for entry in moe_modules(smaller):
        ids = torch.tensor(kept[entry.layer])
        for holder in (entry.router, entry.experts, entry.block):
            for tensor in [*holder.parameters(recurse=False), *holder.buffers(recurse=False)]:
                if tensor.dim() and tensor.shape[0] == entry.num_experts:
                    tensor.data = tensor.data[ids]
            if hasattr(holder, "num_experts"):
                holder.num_experts = len(ids)
    return smaller


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "minimax_m2", "jamba"])
def test_masking_equals_cutting(model_type: str):
    model, tokens = build_tiny(model_type), probe_tokens()
    modules = moe_modules(model)
    kept = keep_ids([entry.layer for entry in modules])
    with masked_routing(model, as_masks(modules, kept)):
        masked = logits(model, tokens)
    assert (masked - logits(cut_experts(model, kept), tokens)).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "lfm2_moe", "llama4_text", "dbrx", "phimoe"])
def test_every_sequence_can_have_its_own_coalition(model_type: str):
    model, tokens = build_tiny(model_type), probe_tokens(batch=4)
    modules = moe_modules(model)
    rng = np.random.default_rng(3)
    masks = {entry.name: rng.random((4, entry.num_experts)) < 0.6 for entry in modules}
    with masked_routing(model, masks):
        together = logits(model, tokens)
    for row in range(4):
        with masked_routing(model, {name: mask[row] for name, mask in masks.items()}):
            alone = logits(model, tokens[row : row + 1])
        assert (together[row] - alone[0]).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", ["phimoe", "mixtral", "qwen2_moe", "gpt_oss"])
def test_a_router_can_be_replayed_on_recorded_logits(model_type: str):
    model, tokens = build_tiny(model_type), probe_tokens()
    modules = moe_modules(model)
    present = torch.tensor([True, False, True, True, False, False, True, False])
    calls: list[RoutingCall] = []
    with masked_routing(model, {entry.name: present for entry in modules}, observe=calls.append):
        logits(model, tokens)
    for call in calls:
        index, gates = route_logits(call.module, call.logits, present)
        assert (dense(index, gates, 8) - dense(call.index, call.gates, 8)).abs().max() < 1e-6


def test_the_gates_seen_are_the_gates_that_act():
    model, tokens = build_tiny("deepseek_v3"), probe_tokens()
    calls: list[RoutingCall] = []
    with masked_routing(model, observe=calls.append):
        logits(model, tokens)
    for call in calls:
        assert call.gates.sum(dim=1).sub(call.module.router.routed_scaling_factor).abs().max() < 1e-5
        assert call.available.all()


def test_masks_work_in_bfloat16():
    model, tokens = build_tiny("qwen3_moe", dtype=torch.bfloat16), probe_tokens()
    model.set_experts_implementation("eager")  # grouped_mm wants wider experts in bfloat16
    modules = moe_modules(model)
    kept = keep_ids([entry.layer for entry in modules])
    with masked_routing(model, as_masks(modules, kept)):
        masked = logits(model, tokens)
    assert torch.equal(masked, masked_logits(model, tokens, kept))


def test_an_error_inside_the_context_still_restores_the_model():
    model, tokens = build_tiny("mixtral"), probe_tokens()
    before = logits(model, tokens)
    modules = moe_modules(model)
    with pytest.raises(RuntimeError, match="stop"), masked_routing(model, as_masks(modules, keep_ids([0, 1, 2]))):
        raise RuntimeError("stop")
    assert torch.equal(logits(model, tokens), before)


def test_wrong_masks_are_named():
    model = build_tiny("mixtral")
    name = moe_modules(model)[0].name
    with (
        pytest.raises(UsageError, match="not a MoE block"),
        masked_routing(model, {"model.layers.9": np.ones(8, bool)}),
    ):
        pass
    with pytest.raises(UsageError, match=r"bool \[8\]"), masked_routing(model, {name: np.ones(7, dtype=bool)}):
        pass
    with pytest.raises(UsageError, match=r"bool \[8\]"), masked_routing(model, {name: np.ones(8)}):
        pass


def test_as_many_coalitions_as_sequences_or_one():
    model = build_tiny("mixtral")
    name = moe_modules(model)[0].name
    with pytest.raises(UsageError, match="coalitions"), masked_routing(model, {name: np.ones((5, 8), dtype=bool)}):
        logits(model, probe_tokens(batch=3))


def test_models_that_cannot_be_masked_are_refused():
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dense_model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", intermediate_size=16, **small))
    with pytest.raises(UnsupportedModelError, match="no mixture-of-experts block"):
        moe_modules(dense_model)
    jetmoe = AutoConfig.for_model("jetmoe", intermediate_size=16, kv_channels=8, num_key_value_heads=2, **small)
    with pytest.raises(UnsupportedModelError, match="jetmoe"):
        moe_modules(AutoModelForCausalLM.from_config(jetmoe))
