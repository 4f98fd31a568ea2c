"""A score file carries every number of the scores, bit for bit, and refuses anything that is not a score file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from xmac_cli.cli.errors import InputError
from xmac_cli.prune_moe.scores import ExpertScores, LayerScores, load_scores, save_scores


def example_scores() -> ExpertScores:
    rng = np.random.default_rng(0)
    layers = tuple(
        LayerScores(
            name=f"model.layers.{layer}.mlp",
            layer=layer,
            phi=rng.normal(size=n),
            se=rng.random(n),
            evals=rng.integers(0, 20, n),
            extra={"freq": rng.random(n), "gate_mean": rng.random(n)},
        )
        for layer, n in ((1, 8), (11, 6))
    )
    return ExpertScores("shapley", layers, {"V_full": 0.25, "seed": 3, "options": {"truncate": 0.5}})


def assert_equal(a: ExpertScores, b: ExpertScores) -> None:
    assert (a.criterion, a.metadata) == (b.criterion, b.metadata)
    assert [(x.name, x.layer) for x in a.layers] == [(x.name, x.layer) for x in b.layers]
    for left, right in zip(a.layers, b.layers, strict=True):
        mine, theirs = dict(left.statistics()), dict(right.statistics())
        assert mine.keys() == theirs.keys()
        for label in mine:
            np.testing.assert_array_equal(mine[label], theirs[label])
            assert mine[label].dtype == theirs[label].dtype


@pytest.mark.parametrize("file", ["", "scores.safetensors", "scores.json"])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, file: str) -> None:
    scores = example_scores()
    save_scores(tmp_path, scores)
    assert_equal(load_scores(tmp_path / file), scores)


def test_tensor_names_follow_the_documented_scheme(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(save_scores(tmp_path, example_scores()))
    assert {"phi.1", "phi_se.1", "evals.1", "freq.1", "gate_mean.1", "phi.11"} <= tensors.keys()
    assert tensors["phi.1"].dtype == np.float64
    assert tensors["evals.11"].dtype == np.int64


def test_equal_scores_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_scores(tmp_path / name, example_scores())
    for file in ("scores.safetensors", "scores.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_an_edited_json_file_is_read_back(tmp_path: Path) -> None:
    save_scores(tmp_path, example_scores())
    path = tmp_path / "scores.json"
    document = json.loads(path.read_text())
    document["layers"][0]["phi"][2] = 99.0
    path.write_text(json.dumps(document))
    assert load_scores(path).for_layer(1).phi[2] == 99.0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema="other"), "schema"),
        (lambda d: d.update(layers="none"), "layers"),
        (lambda d: d["layers"][0].pop("phi"), "no `phi` for layer 1"),
        (lambda d: d["layers"][0].update(phi=[1.0, None]), "layer 1"),
        (lambda d: d["layers"][0]["phi"].__setitem__(0, float("nan")), "not finite"),
        (lambda d: d["layers"][0].update(freq=[1.0]), "`freq` of layer 1"),
        (lambda d: d["layers"].reverse(), "ascending"),
        (lambda d: d["layers"][0].update(layer=True), "`layer` number"),
        (lambda d: d["layers"][0].update(evals=[10**30] * 3), "layer 1"),
        (lambda d: d.update(metadata=["made", "by hand"]), "`metadata`"),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(tmp_path: Path, edit, message: str) -> None:
    save_scores(tmp_path, example_scores())
    path = tmp_path / "scores.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message):
        load_scores(path)


def test_a_directory_that_holds_only_the_edited_json_is_read(tmp_path: Path) -> None:
    save_scores(tmp_path, example_scores()).unlink()
    assert_equal(load_scores(tmp_path), example_scores())


def test_absurdly_nested_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text('{"a":' * 20_000 + "1" + "}" * 20_000)
    with pytest.raises(InputError, match="nested too deeply"):
        load_scores(tmp_path)


def test_a_truncated_or_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no expert scores"):
        load_scores(tmp_path)
    path = save_scores(tmp_path, example_scores())
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match="not a readable score file"):
        load_scores(tmp_path)


def test_a_layer_that_was_not_scored_is_named() -> None:
    with pytest.raises(InputError, match="layer 7"):
        example_scores().for_layer(7)
