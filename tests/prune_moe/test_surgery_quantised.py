"""Quantised checkpoints are cut without dequantisation, and names of experts in their configs are renumbered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.masked_reference import reference_masking
from support.prune_cases import prune_to
from support.tiny_moe import TINY, logits, probe_tokens
from support.tiny_quantised import save_block_fp8, save_mxfp4, save_packed_names

from xmac_cli.cli.errors import ConstraintError, UnsupportedModelError
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.quantization_names import renumber_names
from xmac_cli.prune_moe.verify import verify_pruned

KEPT = {0: [0, 2, 3, 5, 6, 7], 1: [1, 2, 4, 5, 6, 7], 2: [0, 1, 2, 3, 4, 6]}
BALANCED = {1: [0, 1, 3, 4, 5, 7], 2: [1, 2, 3, 4, 6, 7]}


def load_dequantised(directory: Path, method: str) -> Any:
    import transformers

    config = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}[method]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=config(dequantize=True), output_loading_info=True
    )
    assert not any(info.values())
    return model.float().eval()


@pytest.mark.parametrize(("method", "model_type"), [("fp8", "qwen3_moe"), ("fp8", "deepseek_v3"), ("mxfp4", "gpt_oss")])
def test_quantised_experts_compute_the_masked_original(method: str, model_type: str, tmp_path: Path) -> None:
    source = save_block_fp8(tmp_path / "a", model_type) if method == "fp8" else save_mxfp4(tmp_path / "a")
    kept = BALANCED if model_type == "deepseek_v3" else KEPT
    layout, plan = prune_to(source, tmp_path / "b", kept)
    model, tokens = load_dequantised(source, method), probe_tokens()
    with reference_masking(model, kept):
        expected = logits(model, tokens)
    difference = (expected - logits(load_dequantised(tmp_path / "b", method), tokens)).abs().max()
    assert difference < 1e-5
    assert verify_pruned(layout, plan, tmp_path / "b", "logits").differences[0].relative < 1e-5
    with pytest.raises(ConstraintError, match="quantised"):
        verify_pruned(layout, plan, tmp_path / "b", "block")


def test_quantised_bytes_are_copied(tmp_path: Path) -> None:
    source = save_block_fp8(tmp_path / "a")
    prune_to(source, tmp_path / "b", KEPT)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    for layer, ids in KEPT.items():
        for new, old in enumerate(ids):
            for suffix in ("weight", "weight_scale_inv"):
                name = f"model.layers.{layer}.mlp.experts.{{}}.up_proj.{suffix}"
                assert torch.equal(
                    after[name.format(new)].view(torch.uint8), before[name.format(old)].view(torch.uint8)
                )


@pytest.mark.parametrize("scheme", ["awq", "gptq", "compressed-tensors"])
def test_packed_tensors_follow_their_expert(scheme: str, tmp_path: Path) -> None:
    source = save_packed_names(tmp_path / "a", scheme)
    layout, plan = prune_to(source, tmp_path / "b", KEPT)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    for layer, ids in KEPT.items():
        prefix = f"model.layers.{layer}.mlp.experts."
        for new, old in enumerate(ids):
            mine = {n.removeprefix(f"{prefix}{old}."): t for n, t in before.items() if n.startswith(f"{prefix}{old}.")}
            written = {
                n.removeprefix(f"{prefix}{new}."): t for n, t in after.items() if n.startswith(f"{prefix}{new}.")
            }
            assert mine.keys() == written.keys()
            assert len(mine) >= 9
            assert all(torch.equal(mine[name], written[name]) for name in mine)
    assert verify_pruned(layout, plan, tmp_path / "b").tensors == len(after)


def test_packed_weights_count_as_what_they_stand_for(tmp_path: Path) -> None:
    """A 4-bit checkpoint has as many parameters as the float model it came from."""
    counts = {
        sniff_layout(save_packed_names(tmp_path / s, s)).parameters for s in ("awq", "gptq", "compressed-tensors")
    }
    assert counts == {sniff_layout(save_block_fp8(tmp_path / "fp8")).parameters}


def test_expert_names_in_the_config_are_renumbered(tmp_path: Path) -> None:
    prune_to(save_packed_names(tmp_path / "a", "awq"), tmp_path / "b", KEPT)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    # layer 0 keeps expert 3 as number 2; layer 1 keeps expert 7 as number 5
    assert config["quantization_config"]["modules_to_not_convert"] == [
        "mlp.gate",
        "model.layers.0.mlp.experts.2",
        "model.layers.1.mlp.experts.5.up_proj",
    ]
    prune_to(save_packed_names(tmp_path / "c", "gptq"), tmp_path / "d", KEPT)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    # layer 2 drops expert 5
    assert config["quantization_config"]["dynamic"] == {
        r"-:.*mlp\.gate.*": {},
        r"+:model\.layers\.0\.mlp\.experts\.1\..*": {"bits": 8},
    }
    prune_to(save_packed_names(tmp_path / "e", "compressed-tensors"), tmp_path / "f", KEPT)
    config = json.loads((tmp_path / "f" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "re:.*mlp.gate$"]


def test_a_quantisation_file_beside_the_config_is_renumbered_too(tmp_path: Path) -> None:
    source = save_block_fp8(tmp_path / "a")
    names = {"quantization": {"exclude_modules": ["model.layers.0.mlp.experts.2.*", "model.layers.0.mlp.experts.1.*"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(names))
    prune_to(source, tmp_path / "b", KEPT)
    written = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())
    assert written == {"quantization": {"exclude_modules": ["model.layers.0.mlp.experts.1.*"]}}


NUMBERING = {("", 0): {0: 0, 3: 1}, ("", 1): {0: 0, 2: 1}, ("mtp", 0): {1: 0}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.experts.1.up_proj"),
        ("model.layers.0.mlp.experts.3", "model.layers.0.mlp.experts.1"),
        ("model.layers.10.mlp.experts.3", "model.layers.10.mlp.experts.3"),
        ("mtp.layers.0.mlp.experts.1", "mtp.layers.0.mlp.experts.0"),
        ("model.layers.0.mlp.shared_experts.up_proj", "model.layers.0.mlp.shared_experts.up_proj"),
        (r"re:.*experts\.\d+\..*", r"re:.*experts\.\d+\..*"),
        ("re:.*mlp.experts.*", "re:.*mlp.experts.*"),
        ("*.experts.[0-9]*", "*.experts.[0-9]*"),
        ("experts.0", "experts.0"),
    ],
)
def test_names_are_renumbered_only_where_they_name_an_expert(name: str, expected: str) -> None:
    numbering = {("", 0): {0: 0, 1: 1}, ("", 1): {0: 0, 1: 1}} if name == "experts.0" else NUMBERING
    assert renumber_names([name], numbering) == [expected]


@pytest.mark.parametrize("name", [r"re:.*experts\.(1|3)\..*", "re:.*experts.[123].up_proj", "experts.3.up_proj"])
def test_patterns_that_pick_experts_in_all_layers_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="quantisation config"):
        renumber_names({"ignore": [name]}, NUMBERING)


def test_the_fixture_covers_every_layer() -> None:
    assert tuple(KEPT) == TINY["qwen3_moe"].moe_layers == TINY["gpt_oss"].moe_layers
