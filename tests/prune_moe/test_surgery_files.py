"""What apply writes: byte-identical slices, shards, index, config, auxiliary files and provenance."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prune_cases import (
    mixtral_config,
    mixtral_tensors,
    prune_to,
    random_scores,
    read_all,
    tree_hash,
    write_files,
)
from support.tiny_moe import build_tiny, load_tiny, logits, masked_logits, probe_tokens, save_tiny

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.cli.errors import ConstraintError, ResumeMismatchError, UnsupportedModelError, UsageError
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.plan import make_plan
from xmac_cli.prune_moe.surgery import apply_plan, planned_shards
from xmac_cli.prune_moe.verify_files import verify_files

KEPT = {0: [0, 1, 3], 1: [1, 2, 3]}


def halves(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Split in the middle of layer 0, so that one layer lies in two shards."""
    names = list(tensors)
    cut = len(names) // 3
    return {n: tensors[n] for n in names[:cut]}, {n: tensors[n] for n in names[cut:]}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_files(tmp_path / "single", mixtral_config(), mixtral_tensors())


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_files(tmp_path / "sharded", mixtral_config(), *halves(mixtral_tensors()))


def expected_tensors(kept: dict[int, list[int]]) -> dict[str, np.ndarray]:
    """The pruned tensors, computed with numpy from the source arrays."""
    source, result = mixtral_tensors(), {}
    result["model.embed_tokens.weight"] = source["model.embed_tokens.weight"]
    for layer, ids in kept.items():
        block = f"model.layers.{layer}.block_sparse_moe"
        result[f"{block}.gate.weight"] = source[f"{block}.gate.weight"][ids]
        for new, old in enumerate(ids):
            for matrix in ("w1", "w2", "w3"):
                name = "{}.experts.{}.{}.weight"
                result[name.format(block, new, matrix)] = source[name.format(block, old, matrix)]
    return result


@pytest.mark.parametrize("which", ["single", "sharded"])
def test_tensors_are_renamed_and_sliced_and_nothing_else(which: str, tmp_path: Path, request: Any) -> None:
    prune_to(request.getfixturevalue(which), tmp_path / "out", KEPT)
    written, expected = read_all(tmp_path / "out"), expected_tensors(KEPT)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor)


def test_one_file_stays_one_file_and_keeps_its_metadata(single: Path, tmp_path: Path) -> None:
    prune_to(single, tmp_path / "out", KEPT)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert Checkpoint.open(tmp_path / "out").shards[0].metadata == {"format": "pt"}


def test_shards_stay_shards_with_a_new_index(sharded: Path, tmp_path: Path) -> None:
    prune_to(sharded, tmp_path / "out", KEPT)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    written = read_all(tmp_path / "out")
    assert index["weight_map"].keys() == written.keys()
    assert set(index["weight_map"].values()) == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())


def test_a_shard_without_survivors_disappears_and_the_rest_is_renumbered(tmp_path: Path) -> None:
    tensors = mixtral_tensors()
    gone = {name: t for name, t in tensors.items() if ".0.block_sparse_moe.experts.2." in name}
    rest = {name: t for name, t in tensors.items() if name not in gone}
    source = write_files(tmp_path / "source", mixtral_config(), gone, *halves(rest))
    prune_to(source, tmp_path / "out", KEPT)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert read_all(tmp_path / "out").keys() == expected_tensors(KEPT).keys()


def test_sharded_real_model_loads_and_equals_the_masked_original(tmp_path: Path) -> None:
    model = build_tiny("qwen3_moe")
    source = save_tiny(model, tmp_path / "a", max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    kept = {0: [0, 2, 3, 4, 5, 7], 1: [0, 1, 2, 5, 6, 7], 2: [1, 2, 3, 4, 5, 6]}
    prune_to(source, tmp_path / "b", kept)
    pruned, info = load_tiny(tmp_path / "b", "qwen3_moe")
    assert not any(info.values())
    difference = masked_logits(model, probe_tokens(), kept) - logits(pruned, probe_tokens())
    assert difference.abs().max() < 1e-5


def test_every_alias_of_the_count_changes_and_nothing_else(tmp_path: Path) -> None:
    config = {
        "zeta": 1,
        **mixtral_config(),
        "num_experts": 4,
        "text_config": {"num_local_experts": 4, "unknown": [4, 4]},
        "moe_capacity": [4, 4, 4],
        "alpha": {"num_experts": 4},
    }
    source = write_files(tmp_path / "source", config, mixtral_tensors())
    prune_to(source, tmp_path / "out", KEPT)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = json.loads(json.dumps(config))
    expected["num_experts"] = expected["num_local_experts"] = expected["text_config"]["num_local_experts"] = 3
    expected["moe_capacity"] = [3, 3, 3]
    assert written == expected
    assert list(written) == list(config)


def test_a_count_that_the_class_default_supplied_is_written(tmp_path: Path) -> None:
    config = {key: value for key, value in mixtral_config().items() if key != "num_local_experts"}
    prune_to(write_files(tmp_path / "source", config, mixtral_tensors()), tmp_path / "out", KEPT)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"] == 3


def test_tokenizer_and_licence_travel_and_duplicate_weights_do_not(single: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "LICENSE", "generation_config.json", "modeling_custom.py", "chat_template.jinja"):
        (single / name).write_text("{}")
    (single / "pytorch_model.bin").write_bytes(b"old weights")
    (single / "original").mkdir()
    (single / "original" / "consolidated.00.pth").write_bytes(b"old weights")
    prune_to(single, tmp_path / "out", KEPT)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "LICENSE", "generation_config.json", "modeling_custom.py"} <= names
    assert not {"pytorch_model.bin", "original"} & names


def test_the_source_is_not_touched(sharded: Path, tmp_path: Path) -> None:
    before = tree_hash(sharded)
    prune_to(sharded, tmp_path / "out", KEPT)
    assert tree_hash(sharded) == before


def test_equal_plans_give_equal_bytes(sharded: Path, tmp_path: Path) -> None:
    prune_to(sharded, tmp_path / "a", KEPT)
    prune_to(sharded, tmp_path / "b", KEPT)
    assert tree_hash(tmp_path / "a") == tree_hash(tmp_path / "b")


def test_pruning_in_two_steps_equals_pruning_at_once(tmp_path: Path) -> None:
    """8 -> 6 -> 5 is 8 -> 5, bit for bit, and the provenance leads back to the first numbering."""
    source = write_files(tmp_path / "source", mixtral_config(8), mixtral_tensors(8))
    prune_to(source, tmp_path / "six", {0: [0, 2, 3, 4, 6, 7], 1: [1, 2, 3, 4, 5, 6]})
    prune_to(tmp_path / "six", tmp_path / "five", {0: [0, 1, 3, 4, 5], 1: [0, 2, 3, 4, 5]})
    direct = {0: [0, 2, 4, 6, 7], 1: [1, 3, 4, 5, 6]}
    prune_to(source, tmp_path / "direct", direct)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "five" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
    provenance = json.loads((tmp_path / "five" / "xmac_prune.json").read_text())
    assert provenance["original_experts"] == {"0": direct[0], "1": direct[1]}
    assert [(step["n_before"], step["n_after"]) for step in provenance["steps"]] == [(8, 6), (6, 5)]


def test_the_model_card_gains_one_section(single: Path, tmp_path: Path) -> None:
    (single / "README.md").write_text("---\nlicense: mit\n---\n# My model\n")
    prune_to(single, tmp_path / "once", KEPT)
    prune_to(tmp_path / "once", tmp_path / "twice", {0: [0, 1], 1: [0, 2]})
    card = (tmp_path / "twice" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n# My model\n")
    assert card.count("## Pruned experts") == 1
    assert "| 4 → 3 | 25.0% |" in card
    assert "| 3 → 2 | 33.3% |" in card


def test_a_snapshot_of_symbolic_links_is_read(sharded: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "models--org--name"
    snapshot = hub / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    for path in sharded.iterdir():
        blob = hub / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    _, plan = prune_to(snapshot, tmp_path / "out", KEPT)
    assert plan.source["name"] == "org/name"
    assert read_all(tmp_path / "out").keys() == expected_tensors(KEPT).keys()


def test_destinations_that_would_do_harm_are_refused(single: Path, tmp_path: Path) -> None:
    layout = sniff_layout(single)
    plan = make_plan(layout, random_scores(layout), Budget.of(keep=3))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    for destination in (single, single / "inside", tmp_path / "taken"):
        with pytest.raises(UsageError):
            apply_plan(single, destination, plan)
    assert apply_plan(single, tmp_path / "taken", plan, overwrite=True)
    assert not (tmp_path / "taken" / "file").exists()


def test_a_model_with_attachments_is_refused(tmp_path: Path) -> None:
    config = mixtral_config(xmac={"attachments": {"gate": {"folder": "gate"}}})
    source = write_files(tmp_path / "source", config, mixtral_tensors())
    (source / "gate").mkdir()
    with pytest.raises(ConstraintError, match="attachments"):
        prune_to(source, tmp_path / "out", KEPT)


def test_shares_of_the_work_add_up_to_the_whole(sharded: Path, tmp_path: Path) -> None:
    layout = sniff_layout(sharded)
    plan = make_plan(layout, random_scores(layout), Budget.of(keep=3))
    assert apply_plan(sharded, tmp_path / "whole", plan)
    assert not apply_plan(sharded, tmp_path / "split", plan, shards=(1, 2))
    assert not (tmp_path / "split").exists()
    assert apply_plan(sharded, tmp_path / "split", plan, shards=(2, 2))
    assert tree_hash(tmp_path / "split") == tree_hash(tmp_path / "whole")


def test_a_resumed_run_must_have_the_same_plan(sharded: Path, tmp_path: Path) -> None:
    layout = sniff_layout(sharded)
    plans = [make_plan(layout, random_scores(layout), Budget.of(keep=keep)) for keep in (3, 2)]
    assert not apply_plan(sharded, tmp_path / "out", plans[0], shards=(1, 2))
    with pytest.raises(ResumeMismatchError):
        apply_plan(sharded, tmp_path / "out", plans[1], shards=(2, 2))


def test_an_expert_axis_that_is_not_first_goes_through_memory(tmp_path: Path) -> None:
    """ERNIE's bias is [1, E], contiguous; a made-up [2, E] one is gathered. Both must be the columns that stay."""
    from dataclasses import replace

    from xmac_cli.prune_moe import surgery

    tensors = {name.replace("block_sparse_moe", "mlp"): t for name, t in mixtral_tensors().items()}
    bias = np.arange(8, dtype=np.float32).reshape(2, 4)
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"] = bias + layer
    config = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "num_hidden_layers": 2}
    source = write_files(tmp_path / "source", config, tensors)
    layout, plan = prune_to(source, tmp_path / "out", KEPT)
    written = read_all(tmp_path / "out")
    for layer, ids in KEPT.items():
        name = f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"
        np.testing.assert_array_equal(written[name], (bias + layer)[:, ids])
    assert verify_files(layout, plan, tmp_path / "out") == len(written)
    half = replace(layout.checkpoint.tensors["model.layers.0.mlp.gate.weight"], end=0)
    claim = layout.layers[0].claims["model.layers.0.mlp.gate.weight"]
    with pytest.raises(UnsupportedModelError, match="whole number of bytes"):
        surgery._slice_experts(replace(half, start=0, end=13), claim, layout.layers[0], (0, 1, 2), None)


def test_counts_of_what_happens_to_tensors_add_up(sharded: Path) -> None:
    layout = sniff_layout(sharded)
    plan = make_plan(layout, random_scores(layout), Budget.of(keep=3))
    shards, counts = planned_shards(layout, plan)
    assert (counts.copied, counts.renamed, counts.sliced, counts.dropped, counts.padded) == (1, 18, 2, 6, 0)
    assert sum(len(shard.tensors) for shard in shards) == 21
