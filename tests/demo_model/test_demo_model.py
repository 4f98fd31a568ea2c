"""The verb: a published directory with lineage, data files for the next verb, and a cache that is reused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.command_line import XMAC

from xmac_cli.checkpoint.lineage import read_xmac_json
from xmac_cli.checkpoint.verification import verify_directory
from xmac_cli.cli.errors import UsageError
from xmac_cli.data.documents import read_documents
from xmac_cli.demo_model.command import DemoModel
from xmac_cli.eval_ppl.command import EvalPpl


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMAC_CACHE", str(cache))


def tiny() -> DemoModel:
    return DemoModel(model="moe", size="tiny", steps=20)


def test_the_published_directory_is_whole_and_can_be_judged(tmp_path: Path) -> None:
    verb = DemoModel(model="moe", size="tiny", steps=20, data_dir=tmp_path / "data")
    report = verb.run(output=tmp_path / "moe")
    assert report.output == tmp_path / "moe"
    assert not verify_directory(tmp_path / "moe").differences
    document = read_xmac_json(tmp_path / "moe")
    assert document is not None
    assert [step["verb"] for step in document["lineage"]] == ["demo-model"]
    held_out = sorted((tmp_path / "data" / "held-out").glob("*.jsonl"))
    assert {path.stem for path in held_out} == set(report.result["domains"])
    judged = EvalPpl(data=tuple(held_out), bos="always", window=64, stride=32).run(tmp_path / "moe", device="cpu")
    for entry in judged.result["domains"]:
        assert entry["perplexity"] == pytest.approx(report.result["domains"][entry["name"]]["model"], rel=1e-4)


def test_calibration_texts_are_not_held_out_texts(tmp_path: Path) -> None:
    DemoModel(model="moe", size="tiny", steps=20, data_dir=tmp_path / "data").run(output=tmp_path / "moe")
    for path in (tmp_path / "data" / "held-out").glob("*.jsonl"):
        calibration = "".join(read_documents(tmp_path / "data" / "calibration" / path.name).texts)
        for text in read_documents(path).texts:
            assert text not in calibration


def test_the_second_call_copies_from_the_cache(tmp_path: Path, cache: Path) -> None:
    tiny().run(output=tmp_path / "a")
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    tiny().run(output=tmp_path / "b")
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")} == before
    files = [{p.name: p.read_bytes() for p in (tmp_path / n).iterdir() if p.suffix != ".jsonl"} for n in "ab"]
    for content in files:
        content.pop("xmac.json")
    assert files[0] == files[1]


def test_link_shares_the_weights_with_the_cache(tmp_path: Path, cache: Path) -> None:
    tiny().run(output=tmp_path / "a", link=True)
    inodes = {path.stat().st_ino for path in cache.rglob("model.safetensors")}
    assert (tmp_path / "a" / "model.safetensors").stat().st_ino in inodes


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    tiny().run(output=tmp_path / "a", seed=0)
    tiny().run(output=tmp_path / "b", seed=1)
    name = "model.layers.0.mlp.gate.weight"
    weights = [load_file(tmp_path / n / "model.safetensors")[name] for n in "ab"]
    assert (weights[0] - weights[1]).abs().max() > 0.01


def test_the_dry_run_says_what_it_would_cost_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMAC_CACHE", str(tmp_path / "empty"))
    result = DemoModel(model="moe", steps=10).plan(None).result
    assert result["training_tokens"] == 10 * result["rows"] * result["seqlen"]
    assert not (tmp_path / "empty").exists()


def test_options_that_do_not_go_together_are_usage_errors() -> None:
    for options in ({}, {"model": "smollm2", "steps": 3}, {"model": "smollm2", "size": "tiny"}, {"model": "gpt"}):
        with pytest.raises(UsageError):
            DemoModel(**options)  # type: ignore[arg-type]


def test_the_command_line_takes_the_model_as_a_word(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*XMAC, "demo-model", "moe", "-o", str(tmp_path / "out"), "--size", "tiny"]
    run = subprocess.run([*command, "--steps", "20"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{tmp_path / 'out'}\n"
    wrong = subprocess.run([*command[:4], "gpt9", *command[5:]], capture_output=True, text=True, env=environment)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
