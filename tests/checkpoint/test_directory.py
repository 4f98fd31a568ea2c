"""What counts as a model directory, and everything that makes one ambiguous or dangerous."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from support.checkpoint_files import hub_snapshot, random_tensors, raw_file, save_index, save_sharded, save_single, tree

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.cli.errors import InputError, UnsupportedModelError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_sharded(tmp_path / "m", [random_tensors(["a", "b"], 1), random_tensors(["c"], 2)])


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save_single(tmp_path / "s", random_tensors(["a", "b"], 1))


def test_a_sharded_model_is_read_through_its_index(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert [shard.path.name for shard in checkpoint.shards] == [FIRST, SECOND]
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert checkpoint.total_bytes == 3 * 8 * 16 * 2
    assert checkpoint.total_parameters == 3 * 8 * 16
    assert checkpoint.index is not None
    assert checkpoint.index["metadata"]["total_size"] == checkpoint.total_bytes
    assert list(checkpoint.config) == ["architectures", "model_type", "zebra", "alpha"]
    assert checkpoint.name == "m"


def test_a_single_file_needs_no_index(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    assert checkpoint.index is None
    assert set(checkpoint.tensors) == {"a", "b"}


def test_a_relative_path_becomes_absolute(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single.parent)
    checkpoint = Checkpoint.open("s")
    assert checkpoint.path == single
    assert checkpoint.tensors["a"].file == single / "model.safetensors"


def test_a_complete_set_without_index_is_accepted_and_an_incomplete_one_is_not(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert set(Checkpoint.open(sharded).tensors) == {"a", "b", "c"}
    (sharded / FIRST).unlink()
    with pytest.raises(InputError, match="not a complete set"):
        Checkpoint.open(sharded)


def test_one_file_of_another_name_is_the_model(single: Path) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    save_file(random_tensors(["x"], 3), single / "adapter_model.safetensors")
    save_file(random_tensors(["y"], 3), single / "consolidated.safetensors")
    checkpoint = Checkpoint.open(single)
    assert [shard.path.name for shard in checkpoint.shards] == ["weights.safetensors"]
    assert {path.name for path in checkpoint.ignored_files} == {"adapter_model.safetensors", "consolidated.safetensors"}


def test_two_files_of_other_names_are_ambiguous(single: Path) -> None:
    (single / "model.safetensors").rename(single / "one.safetensors")
    shutil.copy(single / "one.safetensors", single / "two.safetensors")
    with pytest.raises(InputError, match="could all be the model"):
        Checkpoint.open(single)


def test_a_single_file_beside_shards_is_ambiguous(sharded: Path, single: Path) -> None:
    shutil.copy(single / "model.safetensors", sharded)
    with pytest.raises(InputError, match="not in it"):
        Checkpoint.open(sharded)
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match="which one is the model"):
        Checkpoint.open(sharded)


def test_a_stale_shard_beside_the_index_is_refused(sharded: Path) -> None:
    shutil.copy(sharded / FIRST, sharded / "model-00001-of-00009.safetensors")
    with pytest.raises(InputError, match="lie beside"):
        Checkpoint.open(sharded)


def test_an_adapter_and_a_pipeline_are_no_models(tmp_path: Path) -> None:
    save_file(random_tensors(["lora_A"], 3), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="adapter"):
        Checkpoint.open(tmp_path)
    (tmp_path / "adapter_config.json").rename(tmp_path / "model_index.json")
    with pytest.raises(UnsupportedModelError, match="pipeline"):
        Checkpoint.open(tmp_path)


def test_missing_things_are_named(tmp_path: Path, single: Path) -> None:
    with pytest.raises(InputError, match="not a directory"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(InputError, match="not a directory"):
        Checkpoint.open(single / "config.json")
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(InputError, match="no safetensors weights"):
        Checkpoint.open(single)
    (single / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        Checkpoint.open(single)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd.safetensors", "../m/x.safetensors", "sub/x.safetensors", "..", "", "a\\b.safetensors", "x.bin"]
    + ["./model-00001-of-00002.safetensors", "a\0.safetensors"],
)
def test_an_index_may_only_name_files_beside_it(sharded: Path, name: str) -> None:
    save_index(sharded, {"a": FIRST, "b": FIRST, "c": name})
    with pytest.raises(InputError, match=r"index\.json|not a file name"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": None}, {"a": ["x"]}])
def test_an_index_needs_a_weight_map(sharded: Path, weight_map: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=r"index\.json"):
        Checkpoint.open(sharded)


def test_an_index_that_disagrees_with_the_shards_is_refused(sharded: Path) -> None:
    save_index(sharded, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND})
    with pytest.raises(InputError, match=r"'d' is in .*00002.*but it is not"):
        Checkpoint.open(sharded)
    save_index(sharded, {"a": FIRST, "b": SECOND, "c": SECOND})
    with pytest.raises(InputError, match=r"'b' is in .*00002.*but it is not"):
        Checkpoint.open(sharded)
    save_index(sharded, {"a": FIRST, "c": SECOND})
    with pytest.raises(InputError, match=r"holds 'b', which the index does not list"):
        Checkpoint.open(sharded)
    save_index(sharded, {"a": FIRST, "b": FIRST, "c": "model-00003-of-00002.safetensors"})
    with pytest.raises(InputError, match=r"lie beside|cannot open"):
        Checkpoint.open(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with pytest.raises(InputError, match=f"cannot open .*{SECOND}"):
        Checkpoint.open(sharded)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    root = save_sharded(tmp_path / "m", [random_tensors(["a", "b"], 1), random_tensors(["b"], 2)])
    with pytest.raises(InputError, match=r"'b' is in .*00001.* and in .*00002"):
        Checkpoint.open(root)


def test_repeated_keys_in_index_and_config_are_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(InputError, match="'a' appears twice"):
        Checkpoint.open(sharded)
    index.write_text(good)
    (sharded / "config.json").write_text('{"num_experts": 8, "num_experts": 4}')
    with pytest.raises(InputError, match="'num_experts' appears twice"):
        Checkpoint.open(sharded)


def test_a_config_may_hold_infinity_but_must_be_an_object(single: Path) -> None:
    (single / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert Checkpoint.open(single).config["time_step_limit"][1] == float("inf")
    for text in ("[]", "3", "", "[" * 100_000, "\xff"):
        (single / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=r"config\.json"):
            Checkpoint.open(single)


def test_a_hub_snapshot_is_followed_into_its_blobs(tmp_path: Path, sharded: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "cache", tree(sharded) | {"tokenizer.json": b"{}", "sub/code.py": b"x = 1"})
    checkpoint = Checkpoint.open(snapshot)
    assert set(checkpoint.tensors) == {"a", "b", "c"}
    assert checkpoint.name == "org/name"
    assert {path.as_posix() for path in checkpoint.auxiliary_files} == {"tokenizer.json", "sub/code.py"}


def test_a_snapshot_may_not_borrow_from_another_repository(tmp_path: Path, single: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "cache", tree(single))
    other = hub_snapshot(tmp_path / "cache", tree(single), repository="models--other--name")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to((other / "model.safetensors").resolve())
    with pytest.raises(InputError, match="leads outside"):
        Checkpoint.open(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, single: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((single / name).read_bytes() if (single / name).exists() else b"{}")
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to(secret)
    with pytest.raises(InputError, match=f"{name} is a link that leads outside"):
        Checkpoint.open(single)


def test_links_inside_the_directory_and_to_the_directory_are_fine(tmp_path: Path, single: Path) -> None:
    (single / "model.safetensors").rename(single / "real.weights")
    (single / "model.safetensors").symlink_to("real.weights")
    (tmp_path / "alias").symlink_to(single)
    assert set(Checkpoint.open(tmp_path / "alias").tensors) == {"a", "b"}


def test_a_blob_store_look_alike_outside_a_cache_is_no_excuse(tmp_path: Path, single: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (single / "model.safetensors").rename(tmp_path / "blobs" / "x")
    (tmp_path / "snapshots").mkdir()
    root = tmp_path / "snapshots" / "1"
    single.rename(root)
    (root / "model.safetensors").symlink_to("../../blobs/x")
    with pytest.raises(InputError, match="leads outside"):
        Checkpoint.open(root)


def test_a_pipe_in_place_of_a_file_does_not_make_us_wait(single: Path) -> None:
    (single / "config.json").unlink()
    os.mkfifo(single / "config.json")
    with pytest.raises(InputError, match="not a plain file"):
        Checkpoint.open(single)


def test_a_link_to_itself_is_an_input_error(single: Path) -> None:
    (single / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(InputError, match=r"cannot be read: .*tokenizer\.json"):
        Checkpoint.open(single)


def test_resource_forks_of_other_systems_are_overlooked(single: Path) -> None:
    (single / "._model.safetensors").write_bytes(b"junk")
    assert set(Checkpoint.open(single).tensors) == {"a", "b"}


def test_what_travels_with_a_model_and_what_stays(single: Path) -> None:
    kept = [
        "tokenizer.json",
        "tokenizer.model",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
    ]
    kept += ["generation_config.json", "preprocessor_config.json", "modeling_x.py", "code/deep.py", "qwen.tiktoken"]
    left = [
        "pytorch_model.bin",
        "model.gguf",
        "x.pth",
        "consolidated.00.pth",
        "params.json",
        "model.onnx",
        "tf_model.h5",
    ]
    left += ["pytorch_model.bin.index.json", "adapter_config.json", "weird.xyz"]
    silent = [
        ".gitattributes",
        ".cache/x.json",
        "original/params.txt",
        "onnx/model.json",
        "checkpoint-9/tokenizer.json",
    ]
    silent += ["checkpoint-9/model.safetensors", "xmac.json"]
    for name in kept + left + silent:
        (single / name).parent.mkdir(parents=True, exist_ok=True)
        (single / name).write_bytes(b"{}")
    checkpoint = Checkpoint.open(single)
    assert {path.as_posix() for path in checkpoint.auxiliary_files} == set(kept)
    assert {path.as_posix() for path in checkpoint.ignored_files} == set(left)


def test_attachment_folders_belong_to_nobody_s_auxiliary_files(single: Path) -> None:
    (single / "attachments" / "gate").mkdir(parents=True)
    (single / "attachments" / "gate" / "config.json").write_text("{}")
    config = {"model_type": "t", "xmac": {"attachments": {"gate": {"folder": "attachments/gate", "depends_on": "x"}}}}
    (single / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(single)
    assert not checkpoint.auxiliary_files
    assert not checkpoint.ignored_files


@pytest.mark.parametrize(
    "xmac",
    [1, [], {"attachments": []}, {"attachments": {"a": 1}}, {"attachments": {"a": {}}}]
    + [{"attachments": {"a": {"folder": folder}}} for folder in ("/etc", "../x", "", "a/../../b", "a\0b", 5)],
)
def test_a_malformed_attachment_is_refused(single: Path, xmac: object) -> None:
    (single / "config.json").write_text(json.dumps({"xmac": xmac}))
    with pytest.raises(InputError, match=r"config\.json"):
        Checkpoint.open(single)


def test_an_empty_shard_is_allowed(tmp_path: Path) -> None:
    root = tmp_path / "m"
    root.mkdir()
    (root / "config.json").write_text("{}")
    raw_file(root / "model.safetensors", {})
    assert Checkpoint.open(root).total_bytes == 0
