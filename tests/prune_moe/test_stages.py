"""Files between the stages: an option that contradicts a stored plan or stored scores stops the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.data_tokenizers import character_tokenizer
from support.tiny_moe import build_tiny, save_tiny

from xmac_cli.cli.errors import InputError, ResumeMismatchError, UsageError, XmacError
from xmac_cli.prune_moe.command import PruneMoe
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.plan import placeholder_scores
from xmac_cli.prune_moe.scores import ExpertScores, save_scores


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(build_tiny("mixtral"), tmp_path_factory.mktemp("model"))


@pytest.fixture
def scores(model: Path, tmp_path: Path) -> Path:
    save_scores(tmp_path / "scores", replace(placeholder_scores(sniff_layout(model)), criterion="reap"))
    return tmp_path / "scores"


@pytest.fixture
def plan(model: Path, scores: Path, tmp_path: Path) -> Path:
    PruneMoe(stage="plan", scores=scores, keep=6, plan_out=tmp_path / "plan.json").run(model)
    return tmp_path / "plan.json"


def test_a_budget_beside_a_plan_must_be_the_plan_s_own(model: Path, plan: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"made for keep 6, but ratio 0\.5 is asked for"):
        PruneMoe(stage="apply", plan_file=plan, ratio=0.5).run(model, tmp_path / "out")
    PruneMoe(stage="apply", plan_file=plan, keep=6).run(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"] == 6


def test_another_policy_for_next_token_layers_than_the_plan_s_is_refused(
    model: Path, plan: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="says slice for next-token layers, but --mtp drop"):
        PruneMoe(stage="apply", plan_file=plan, mtp="drop").run(model, tmp_path / "out")


def test_a_plan_is_never_ignored(plan: Path) -> None:
    with pytest.raises(UsageError, match="--plan says which experts stay"):
        PruneMoe(plan_file=plan, keep=4, criterion="random")


def test_scores_of_another_criterion_are_not_passed_off_as_the_one_asked_for(
    model: Path, scores: Path, tmp_path: Path
) -> None:
    verb = PruneMoe(stage="plan", scores=scores, criterion="frequency", keep=6, plan_out=tmp_path / "p.json")
    with pytest.raises(UsageError, match="criterion 'reap', but --criterion frequency"):
        verb.run(model)


def test_scores_of_a_deeper_model_are_refused(model: Path, tmp_path: Path) -> None:
    own = placeholder_scores(sniff_layout(model))
    deeper = (*own.layers, replace(own.layers[-1], layer=3))
    save_scores(tmp_path / "scores", ExpertScores("reap", deeper))
    with pytest.raises(InputError, match=r"another model: they name the layers \[3\]"):
        PruneMoe(stage="plan", scores=tmp_path / "scores", keep=6, plan_out=tmp_path / "p.json").run(model)


def test_scores_of_another_checkpoint_with_the_same_layers_are_used_with_a_warning(model: Path, tmp_path: Path) -> None:
    own = placeholder_scores(sniff_layout(model))
    save_scores(tmp_path / "scores", replace(own, metadata={"model_fingerprint": "of another"}))
    report = PruneMoe(stage="plan", scores=tmp_path / "scores", keep=6, plan_out=tmp_path / "p.json").run(model)
    assert any("made on another checkpoint" in warning for warning in report.warnings)


def test_scores_may_be_named_by_their_file(model: Path, scores: Path, tmp_path: Path) -> None:
    by_name = {}
    for name in (".", "scores.json", "scores.safetensors"):
        out = tmp_path / f"{name}.plan"
        PruneMoe(stage="plan", scores=scores / name, keep=6, plan_out=out).run(model)
        by_name[name] = json.loads(out.read_text())
    assert by_name["scores.json"]["scores"]["file"] == "scores.json"
    assert by_name["."]["layers"] == by_name["scores.json"]["layers"] == by_name["scores.safetensors"]["layers"]


@pytest.mark.parametrize("place", ["scores", "plan.json/plan.json"])
def test_a_place_for_the_plan_that_cannot_be_written_is_named_before_the_work(
    model: Path, plan: Path, scores: Path, tmp_path: Path, place: str
) -> None:
    with pytest.raises(UsageError, match="--plan-out"):
        PruneMoe(scores=scores, keep=6, plan_out=tmp_path / place).run(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_resume_does_not_mix_an_edited_plan_into_what_the_first_one_began(
    model: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb = PruneMoe(stage="apply", plan_file=plan)

    def stop(*_: object, **__: object) -> None:
        raise XmacError("stopped before publication")

    with monkeypatch.context() as patch:
        patch.setattr("xmac_cli.prune_moe.verify.verify_pruned", stop)
        with pytest.raises(XmacError, match="stopped"):
            verb.run(model, tmp_path / "out")
    document = json.loads(plan.read_text())
    for layer in document["layers"]:
        layer["keep"] = layer.pop("drop") + layer["keep"][:4]
        layer["keep"].sort()
    plan.write_text(json.dumps(document))
    with pytest.raises(ResumeMismatchError):
        verb.run(model, tmp_path / "out", resume=True)


def test_the_published_setting_is_run_as_one_word(model: Path, tmp_path: Path) -> None:
    ids = 3 + torch.arange(48).reshape(2, 24) % 30
    save_file({"input_ids": ids}, tmp_path / "calib.safetensors")
    (tmp_path / "model").mkdir()
    for file in model.iterdir():
        shutil.copy(file, tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    verb = PruneMoe(
        stage="score", preset="paper", calib=(tmp_path / "calib.safetensors",), calib_samples=2, calib_seqlen=24
    )
    report = verb.run(tmp_path / "model", tmp_path / "scores")
    assert report.output == tmp_path / "scores"
    used = json.loads((tmp_path / "scores" / "scores.json").read_text())["metadata"]["options"]
    assert {name: used[name] for name in ("value", "rgis_weights", "rgis_mix", "permutations", "truncate")} == {
        "value": "ppl",
        "rgis_weights": "full",
        "rgis_mix": 0.0,
        "permutations": 20,
        "truncate": 0.5,
    }
