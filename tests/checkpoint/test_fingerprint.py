"""Fast and full identities, lineage, and the check of a directory against its own record."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoint_files import CONFIG, hub_snapshot, random_tensors, save_sharded, save_single, sha256, tree

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.fingerprint import fast_fingerprint, full_fingerprint, local_identity
from xmac_cli.checkpoint.hashing import TrailingHash, hash_file, hash_files
from xmac_cli.checkpoint.lineage import read_xmac_json, write_xmac_json
from xmac_cli.checkpoint.verification import verify_directory
from xmac_cli.checkpoint.writer import ShardRecord
from xmac_cli.cli.errors import InputError, VerificationError

STEP: dict[str, Any] = {"verb": "prune-moe", "version": "0", "options": {}, "seed": 0, "input": None}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = save_sharded(tmp_path / "m", [random_tensors(["a", "b"], 1), random_tensors(["c"], 2)])
    (root / "tokenizer.json").write_text("{}")
    return root


@pytest.fixture
def recorded(model: Path) -> Path:
    """A model with an xmac.json."""
    write_xmac_json(model, STEP, {"result": {}}, [])
    return model


def fast(root: Path) -> str:
    return fast_fingerprint(Checkpoint.open(root))


def full(root: Path) -> str:
    return full_fingerprint(Checkpoint.open(root), threads=2)


def replace_weights(root: Path, seed: int = 99) -> None:
    """Other values in the same shapes."""
    path = root / "model-00002-of-00002.safetensors"
    save_file(random_tensors(list(load_file(path)), seed), path, metadata={"format": "pt"})


def test_both_fingerprints_follow_the_content_and_not_the_place(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere" / "other-name")
    assert fast(model) == fast(tmp_path / "elsewhere" / "other-name")
    assert full(model) == full(tmp_path / "elsewhere" / "other-name")
    assert fast(model).startswith("fast-1:")
    assert len(fast(model)) == len("fast-1:") + 64


@pytest.mark.parametrize("change", ["config", "shape", "name", "metadata", "split"])
def test_the_fast_fingerprint_notices_what_headers_and_config_say(model: Path, tmp_path: Path, change: str) -> None:
    before = fast(model)
    first = model / "model-00001-of-00002.safetensors"
    tensors = load_file(first)
    if change == "config":
        (model / "config.json").write_text(json.dumps({**CONFIG, "zebra": 2}))
    elif change == "shape":
        save_file({**tensors, "a": tensors["a"].reshape(16, 8)}, first, metadata={"format": "pt"})
    elif change == "metadata":
        save_file(tensors, first, metadata={"format": "np"})
    elif change == "name":
        shutil.rmtree(model)
        save_sharded(model, [random_tensors(["a", "B"], 1), random_tensors(["c"], 2)])
    else:
        shutil.rmtree(model)
        save_sharded(model, [random_tensors(["a"], 1), random_tensors(["b", "c"], 2)])
    assert fast(model) != before


def test_only_the_full_fingerprint_and_the_local_identity_notice_other_values(model: Path) -> None:
    before = fast(model), full(model), local_identity(Checkpoint.open(model))
    replace_weights(model)
    after = fast(model), full(model), local_identity(Checkpoint.open(model))
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert after[2] != before[2]


def test_attachments_do_not_change_what_they_depend_on(model: Path) -> None:
    before = fast(model)
    attach(model, before)
    assert fast(model) == before


def attach(root: Path, depends_on: str) -> None:
    """Add a side-car the way an attach verb does."""
    section = {"attachments": {"gate": {"folder": "attachments/gate", "depends_on": depends_on}}}
    (root / "config.json").write_text(json.dumps({**CONFIG, "xmac": section}))
    (root / "attachments" / "gate").mkdir(parents=True, exist_ok=True)
    save_file(random_tensors(["g"], 1), root / "attachments" / "gate" / "gate.safetensors")


def test_hashes_are_sha256(tmp_path: Path) -> None:
    contents = [b"", b"abc", bytes(3_000_001)]
    paths = [tmp_path / str(number) for number in range(3)]
    for path, content in zip(paths, contents):
        path.write_bytes(content)
    expected = [hashlib.sha256(content).hexdigest() for content in contents]
    counted: list[int] = []
    assert list(hash_files(paths, threads=2, on_bytes=counted.append).values()) == expected
    assert sum(counted) == sum(map(len, contents))
    assert [hash_file(path) for path in paths] == expected


def test_a_trailing_hash_follows_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "x"
    content = bytes(range(256)) * 4096
    with path.open("wb") as file:
        file.truncate(len(content))
        hasher = TrailingHash(path)
        for start in range(0, len(content), 100_000):
            part = content[start : start + 100_000]
            file.write(part)
            file.flush()
            hasher.advance(len(part))
        hasher.finish()
    assert hasher.hexdigest() == hashlib.sha256(content).hexdigest()


def test_a_trailing_hash_can_be_abandoned_and_reports_a_cut_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    before = threading.active_count()
    TrailingHash(path).abandon()
    hasher = TrailingHash(path)
    hasher.advance(10)
    hasher.finish()
    with pytest.raises(OSError, match="ended at byte 3"):
        hasher.hexdigest()
    assert threading.active_count() == before


def test_xmac_json_lists_every_file_with_its_hash_and_carries_the_lineage(model: Path) -> None:
    (model / ".hidden").write_text("x")
    (model / "sub").mkdir()
    (model / "sub" / "code.py").write_text("y")
    write_xmac_json(model, STEP, {"result": {"x": 1}}, [{"verb": "earlier"}])
    content = read_xmac_json(model)
    assert content is not None
    assert content["schema"] == "xmac/1"
    assert [step["verb"] for step in content["lineage"]] == ["earlier", "prune-moe"]
    assert content["lineage"][1]["output_fingerprint"] == fast(model)
    assert content["report"] == {"result": {"x": 1}}
    files = {name: entry["sha256"] for name, entry in content["files"].items()}
    assert files == {
        n: hashlib.sha256(c).hexdigest() for n, c in tree(model).items() if n not in ("xmac.json", ".hidden")
    }


def test_known_hashes_are_reused_only_for_the_same_size(model: Path) -> None:
    name = "tokenizer.json"
    write_xmac_json(model, STEP, {}, [], known={name: ShardRecord(name, 2, "trusted")})
    content = read_xmac_json(model)
    assert content is not None
    assert content["files"][name]["sha256"] == "trusted"
    write_xmac_json(model, STEP, {}, [], known={name: ShardRecord(name, 3, "stale")})
    content = read_xmac_json(model)
    assert content is not None
    assert content["files"][name]["sha256"] == sha256(model / name)


def test_no_xmac_json_is_no_error_and_a_broken_one_is(model: Path) -> None:
    assert read_xmac_json(model) is None
    good = {"schema": "xmac/1", "lineage": [], "report": {}, "files": {}}
    for broken in (
        {},
        {**good, "schema": "xmac/2"},
        {**good, "lineage": {}},
        {**good, "lineage": [1]},
        {**good, "files": []},
        {**good, "files": {"a": {"bytes": "1", "sha256": "x"}}},
        {**good, "files": {"a": {"bytes": True, "sha256": "x"}}},
        {**good, "files": {"a": 1}},
    ):
        (model / "xmac.json").write_text(json.dumps(broken))
        with pytest.raises(InputError, match=r"xmac\.json"):
            read_xmac_json(model)


def test_an_untouched_directory_verifies(recorded: Path) -> None:
    result = verify_directory(recorded)
    assert result.recorded
    assert not result.differences
    assert not result.notes
    assert result.hashed_files == 5
    assert result.hashed_bytes == sum(len(content) for name, content in tree(recorded).items() if name != "xmac.json")
    result.raise_for_differences()


def flip(root: Path) -> None:
    path = root / "model-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def forge_config(root: Path) -> None:
    text = (root / "config.json").read_text()
    (root / "config.json").write_text(text.replace("1", "2", 1))


def escape(root: Path) -> None:
    content = json.loads((root / "xmac.json").read_text())
    content["files"]["../m/config.json"] = content["files"]["config.json"]
    (root / "xmac.json").write_text(json.dumps(content))


def forge_fingerprint(root: Path) -> None:
    content = json.loads((root / "xmac.json").read_text())
    content["lineage"][-1]["output_fingerprint"] = "fast-1:0"
    (root / "xmac.json").write_text(json.dumps(content))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one flipped bit": (flip, "00001-of-00002.safetensors has other content"),
    "other weights": (replace_weights, "00002-of-00002.safetensors has other content"),
    "edited config": (forge_config, "config.json has"),
    "missing tokenizer": (lambda root: (root / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "longer tokenizer": (lambda root: (root / "tokenizer.json").write_text("{ }"), "has 3 bytes, not 2"),
    "smuggled pickle": (lambda root: (root / "pytorch_model.bin").write_text("x"), "pytorch_model.bin is not listed"),
    "smuggled code": (lambda root: (root / "modeling_x.py").write_text("x"), "modeling_x.py is not listed"),
    "missing shard": (lambda root: (root / "model-00002-of-00002.safetensors").unlink(), "cannot open"),
    "stale shard": (
        lambda root: shutil.copy(root / "model-00002-of-00002.safetensors", root / "model.safetensors"),
        "beside",
    ),
    "path outside in the record": (escape, "not a file name inside"),
    "another origin": (forge_fingerprint, "last step of the lineage produced fast-1:0"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_whatever_was_changed_is_named(recorded: Path, case: str) -> None:
    damage, sentence = DAMAGE[case]
    damage(recorded)
    result = verify_directory(recorded)
    assert any(sentence in difference for difference in result.differences), result.differences
    with pytest.raises(VerificationError, match="differences") as caught:
        result.raise_for_differences()
    assert caught.value.exit_code == 5
    assert sentence in caught.value.message


def test_a_stray_note_is_only_mentioned(recorded: Path) -> None:
    (recorded / "notes.txt").write_text("x")
    result = verify_directory(recorded)
    assert not result.differences
    assert "notes.txt" in result.notes[0]


def test_attachments_are_checked_against_the_checkpoint(model: Path) -> None:
    attach(model, fast(model))
    write_xmac_json(model, STEP, {}, [])
    result = verify_directory(model)
    assert result.attachments == ("gate",)
    assert not result.differences
    attach(model, "fast-1:other")
    assert any("attachment gate was made for fast-1:other" in d for d in verify_directory(model).differences)
    shutil.rmtree(model / "attachments")
    assert any("its folder attachments/gate is missing" in d for d in verify_directory(model).differences)


def test_a_model_without_record_is_checked_for_format_only(model: Path) -> None:
    result = verify_directory(model)
    assert not result.recorded
    assert not result.differences
    assert "no xmac.json" in result.notes[0]
    path = model / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert any("1 are missing" in difference for difference in verify_directory(model).differences)


def test_a_hub_snapshot_is_checked_against_the_names_of_its_blobs(tmp_path: Path) -> None:
    source = save_single(tmp_path / "s", random_tensors(["a"], 1))
    snapshot = hub_snapshot(tmp_path / "cache", tree(source))
    result = verify_directory(snapshot)
    assert not result.differences
    assert result.hashed_files == 2
    blob = (snapshot / "model.safetensors").resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    assert any("model.safetensors has other content" in d for d in verify_directory(snapshot).differences)


def test_what_is_neither_checkpoint_nor_output_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a checkpoint"):
        verify_directory(tmp_path)
    with pytest.raises(InputError, match="not a directory"):
        verify_directory(tmp_path / "absent")
