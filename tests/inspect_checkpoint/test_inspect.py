"""What `xmac inspect` says about a checkpoint, against counts by module class, closed forms and the bytes it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.checkpoint_files import CONFIG, entry, random_tensors, raw_file, save_single
from support.command_line import XMAC
from support.inspect_models import CONFIGS, parameters_by_module

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.fingerprint import fast_fingerprint
from xmac_cli.checkpoint.header import encode_header
from xmac_cli.checkpoint.lineage import write_xmac_json
from xmac_cli.inspect_checkpoint.command import InspectCheckpoint
from xmac_cli.inspect_checkpoint.parts import PARTS, PartClassifier, expert_place
from xmac_cli.inspect_checkpoint.summary import Summary, summarize

MOE_FAMILIES = [name for name in CONFIGS if name not in ("llama", "gpt2")]


def inspect(root: Path) -> Summary:
    return summarize(Checkpoint.open(root))


def counts(summary: Summary) -> dict[str, int]:
    return {part.part: part.parameters for part in summary.parts}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Every family, built and saved once."""
    models: dict[str, tuple[Any, Path]] = {}
    for name, config in CONFIGS.items():
        model = hf.AutoModelForCausalLM.from_config(config())
        root = tmp_path_factory.mktemp(name)
        model.save_pretrained(root)
        models[name] = (model, root)
    return models


@pytest.mark.parametrize("family", CONFIGS)
def test_parts_agree_with_the_modules_of_transformers(saved: dict[str, tuple[Any, Path]], family: str) -> None:
    model, root = saved[family]
    summary = inspect(root)
    expected = parameters_by_module(model)
    buffers = sum(b.numel() for name, b in model.named_buffers() if "bias" in name)
    found = counts(summary)
    assert found.get("router", 0) == expected.pop("router", 0) + buffers
    assert {part: n for part, n in found.items() if part != "router"} == dict(expected)
    assert "other" not in found
    assert summary.family.model_type == family


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_shape_of_the_mixture_is_the_config_s(saved: dict[str, tuple[Any, Path]], family: str) -> None:
    model, root = saved[family]
    shape = inspect(root).moe
    assert shape is not None
    text = model.config.to_dict()
    experts = next(
        text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") if k in text
    )
    top_k = text.get("num_experts_per_tok", text.get("moe_k"))
    dense = {"deepseek_v3": 1, "jamba": 1, "ernie4_5_moe": 1}.get(family, 0)
    assert len(shape.layers) == 2 - dense
    assert shape.experts_per_layer == (experts,)
    assert shape.top_k == top_k
    routed = parameters_by_module(model)["routed experts"]
    total = sum(p.numel() for p in model.parameters()) + sum(b.numel() for n, b in model.named_buffers() if "bias" in n)
    assert shape.total_parameters == total
    assert shape.active_parameters == total - routed * (experts - top_k) // experts


def test_a_dense_model_has_no_mixture(saved: dict[str, tuple[Any, Path]]) -> None:
    summary = inspect(saved["llama"][1])
    assert summary.moe is None
    assert summary.family.num_layers == 2
    assert summary.family.facts == {
        "hidden size": 32,
        "attention heads": 4,
        "KV heads": 2,
        "vocabulary": 64,
        "context length": 2048,
    }


NAMES = {
    "model.embed_tokens.weight": "embedding",
    "transformer.wte.weight": "embedding",
    "lm_head.weight": "head",
    "model.norm.weight": "norms",
    "model.layers.0.input_layernorm.weight": "norms",
    "model.layers.0.self_attn.q_norm.weight": "norms",
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.0.self_attn.sinks": "attention",
    "model.layers.0.linear_attn.in_proj_qkvz.weight": "attention",
    "model.layers.0.mlp.down_proj.weight_scale_inv": "dense mlp",
    "model.layers.1.mlp.experts.3.gate_proj.weight": "routed experts",
    "model.layers.1.mlp.experts.3.gate_proj.qweight": "routed experts",
    "model.layers.1.mlp.gate.weight": "router",
    "model.layers.1.mlp.gate.e_score_correction_bias": "router",
    "model.layers.1.mlp.shared_experts.up_proj.weight": "shared experts",
    "model.layers.1.mlp.shared_expert_gate.weight": "shared experts",
    "model.layers.2.block_sparse_moe.experts.0.w1.weight": "routed experts",
    "model.layers.2.block_sparse_moe.gate.weight": "router",
    "model.layers.2.shared_mlp.input_linear.weight": "shared experts",
    "model.layers.3.mlp.experts.gate_up_proj_blocks": "routed experts",
    "model.layers.3.mlp.router.bias": "router",
    "transformer.blocks.1.ffn.experts.mlp.w1": "routed experts",
    "transformer.blocks.1.ffn.router.layer.weight": "router",
    "backbone.layers.2.mixer.experts.1.up_proj.weight": "routed experts",
    "backbone.layers.2.mixer.gate.weight": "router",
    "backbone.layers.0.mixer.A_log": "state space",
    "backbone.layers.1.mixer.q_proj.weight": "attention",
    "model.visual.blocks.0.attn.qkv.weight": "vision",
    "vision_tower.encoder.layers.30.norm.weight": "vision",
    "audio_tower.layers.0.fc1.weight": "audio",
    "mtp.layers.0.mlp.experts.0.up_proj.weight": "next-token layers",
    "model.layers.4.mlp.experts.0.up_proj.weight": "next-token layers",
    "model.layers.4.eh_proj.weight": "next-token layers",
    "model.layers.0.strange.weight": "other",
    "rope_inv_freq": "other",
}


def test_names_of_real_families_fall_into_the_right_parts() -> None:
    axes = {name: 1 if name.endswith(("bias", "norm.weight")) else 2 for name in NAMES}
    classifier = PartClassifier({name: expert_place(name, axes[name]) for name in NAMES}, num_layers=4)
    assert {name: classifier.part(name) for name in NAMES} == NAMES
    assert set(NAMES.values()) == set(PARTS)


def test_a_gate_projection_without_experts_beside_it_is_no_router() -> None:
    names = ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.0.w"]
    classifier = PartClassifier({name: expert_place(name, 2) for name in names}, num_layers=2)
    assert [classifier.part(name) for name in names] == ["dense mlp", "routed experts"]


def synthetic(root: Path, tensors: list[tuple[str, str, list[int], int]], config: dict[str, Any]) -> Path:
    """A sparse checkpoint with the given (name, dtype, shape, bytes)."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = entry(dtype, shape, offset, offset + nbytes)
        offset += nbytes
    path = raw_file(root / "model.safetensors", header)
    os.truncate(path, path.stat().st_size + offset)
    return root


def test_packed_weights_count_as_what_they_stand_for(tmp_path: Path) -> None:
    experts, width, hidden = 4, 64, 96
    prefix = "model.layers.0.mlp.experts."
    mxfp4 = [
        (f"{prefix}down_proj_blocks", "U8", [experts, width, hidden // 32, 16], experts * width * hidden // 2),
        (f"{prefix}down_proj_scales", "U8", [experts, width, hidden // 32], experts * width * hidden // 32),
    ]
    config: dict[str, Any] = {"model_type": "gpt_oss", "num_local_experts": experts, "num_experts_per_tok": 1}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    summary = inspect(synthetic(tmp_path / "mxfp4", mxfp4, config))
    assert summary.parameters == experts * width * hidden
    assert summary.quantization == "mxfp4"
    assert summary.moe is not None
    assert summary.moe.active_parameters == width * hidden

    for bits in (2, 4, 8):
        packed = width * hidden * bits // 32
        gptq = [
            ("model.layers.0.mlp.up_proj.qweight", "I32", [packed // width, width], packed * 4),
            ("model.layers.0.mlp.up_proj.qzeros", "I32", [3, 8], 96),
            ("model.layers.0.mlp.up_proj.scales", "F16", [3, width], 6 * width),
            ("model.layers.0.mlp.up_proj.g_idx", "I32", [hidden], 4 * hidden),
        ]
        config = {"quantization_config": {"quant_method": "gptq", "bits": bits}}
        assert inspect(synthetic(tmp_path / f"gptq{bits}", gptq, config)).parameters == width * hidden

    fp8 = [
        ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", [width, hidden], width * hidden),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", [1, 1], 4),
    ]
    config = {"quantization_config": {"quant_method": "fp8"}}
    assert inspect(synthetic(tmp_path / "fp8", fp8, config)).parameters == width * hidden


def test_drafting_layers_do_not_count_as_active(tmp_path: Path) -> None:
    layer = [(f"model.layers.{n}.mlp.experts.{e}.w1.weight", "BF16", [2, 5], 20) for n in (0, 1) for e in range(4)]
    config = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "num_experts": 4}
    shape = inspect(synthetic(tmp_path / "m", layer, config)).moe
    assert shape is not None
    assert len(shape.layers) == 1
    assert (shape.total_parameters, shape.active_parameters) == (40, 20)


def test_different_layers_and_oddities_are_pointed_out(tmp_path: Path) -> None:
    experts = {0: [0, 1, 2], 1: [0, 2]}
    tensors = [(f"layers.{n}.mlp.experts.{e}.w", "BF16", [4], 8) for n, ids in experts.items() for e in ids]
    tensors += [("mystery.table", "F3_NEW", [9], 5)]
    summary = inspect(synthetic(tmp_path / "m", tensors, {"num_experts": 3, "num_experts_per_tok": [1, 2]}))
    assert summary.moe is not None
    assert summary.moe.experts_per_layer == (2, 3)
    assert summary.moe.top_k == (1, 2)
    assert summary.moe.active_parameters == 12 // 3 + 8 + 9
    text = "\n".join(summary.warnings)
    assert "config.json speaks of 3 experts, the layers hold 2, 3" in text
    assert "layers.1.mlp lacks expert 1" in text
    assert "F3_NEW" in text
    assert "mystery.table" in text


@pytest.mark.parametrize("value", [True, "8", -1, 2.5, None, [], ["a"], {"a": 1}])
def test_a_config_with_wrong_types_is_survived(tmp_path: Path, value: object) -> None:
    config = dict.fromkeys(["num_experts", "num_experts_per_tok", "num_hidden_layers", "vocab_size"], value)
    config |= {"architectures": value, "text_config": value, "quantization_config": value}
    summary = inspect(synthetic(tmp_path / "m", [("layers.0.mlp.experts.0.w", "U8", [4], 4)], config))
    assert summary.moe is not None
    assert summary.moe.active_parameters is None
    assert summary.family.model_type == "unknown"


def test_attachments_and_lineage_are_told(tmp_path: Path) -> None:
    root = save_single(tmp_path / "m", random_tensors(["lm_head.weight"], 1))
    (root / "gate").mkdir()
    wanted = fast_fingerprint(Checkpoint.open(root))
    attachments = {"gate": {"folder": "gate", "depends_on": wanted}, "old": {"folder": "gate", "depends_on": "x"}}
    (root / "config.json").write_text(json.dumps({**CONFIG, "xmac": {"attachments": attachments}}))
    step = {"verb": "attach-gate", "version": "1", "input": {"name": "base"}, "seconds": 1.5}
    write_xmac_json(root, step, {}, [{"verb": "import-gguf"}])
    report = InspectCheckpoint().plan(root)
    assert {name: a["fits"] for name, a in report.result["attachments"].items()} == {"gate": True, "old": False}
    assert [step["verb"] for step in report.result["lineage"]] == ["import-gguf", "attach-gate"]
    assert report.result["fingerprint"] == wanted
    titles = [table.title for table in report.tables]
    assert titles == ["m", "Parameters by part", "Attachments", "Lineage"]
    json.dumps(report.result)


def test_a_terabyte_is_inspected_by_reading_headers(tmp_path: Path) -> None:
    """One terabyte in 40 sparse shards with 20,000 tensors: less than a hundred-thousandth of it is read."""
    experts, layers, size = 128, 40, 26 << 30
    root = tmp_path / "m"
    root.mkdir()
    config = {"model_type": "big", "num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 8}
    (root / "config.json").write_text(json.dumps(config))
    each = size // (4 * experts) // 4096 * 4096
    weight_map = {}
    for layer in range(layers):
        name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        tensors = [
            (f"model.layers.{layer}.mlp.experts.{e}.{w}.weight", "BF16", (2048, each // 4096), each)
            for e in range(experts)
            for w in ("gate_proj", "up_proj", "down_proj")
        ]
        tensors += [
            (f"model.layers.{layer}.self_attn.x{n}.weight", "BF16", (2048, each // 4096), each) for n in range(128)
        ]
        head = encode_header(tensors, {"format": "pt"})
        (root / name).write_bytes(head)
        os.truncate(root / name, len(head) + each * len(tensors))
        weight_map.update({tensor[0]: name for tensor in tensors})
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before, began = characters_read(), time.monotonic()
    report = InspectCheckpoint().plan(root)
    seconds, read = time.monotonic() - began, characters_read() - before
    total = layers * each * experts * 4
    assert total > 10**12
    assert report.result["tensor_bytes"] == total
    assert report.result["moe"]["active_parameters"] == total // 2 - layers * 3 * each // 2 * (experts - 8)
    assert read < total // 100_000
    assert seconds < 30


def characters_read() -> int:
    """Bytes this process has asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_the_command_prints_json_or_the_path(tmp_path: Path) -> None:
    root = save_single(tmp_path / "m", {"lm_head.weight": torch.zeros(4, 4)})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for flags, check in (
        (["--json"], lambda text: json.loads(text)["result"]["parameters"] == 16),
        ([], lambda text: text == f"{root}\n"),
        (["--dry-run"], lambda text: text == ""),
    ):
        command = [*XMAC, "inspect", str(root), *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert check(done.stdout), done.stdout
