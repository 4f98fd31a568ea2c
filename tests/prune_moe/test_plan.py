"""Plans: budgets become counts, counts become ids, and an edited plan.json is checked before it is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prune_cases import mixtral_config, mixtral_tensors, random_scores, read_all, scores_of, write_files

from xmac_cli.cli.errors import ConstraintError, InputError, UsageError
from xmac_cli.prune_moe.budget import Budget, parse_count, parse_size
from xmac_cli.prune_moe.layout import Layout, sniff_layout
from xmac_cli.prune_moe.plan import check_plan, load_plan, make_plan, save_plan, super_experts, with_keep
from xmac_cli.prune_moe.scores import ExpertScores, LayerScores, save_scores
from xmac_cli.prune_moe.surgery import apply_plan, ready_plan

EXPERTS = 16
RATIO = Budget.of(ratio=0.25)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return sniff_layout(write_files(tmp_path / "model", mixtral_config(EXPERTS), mixtral_tensors(EXPERTS)))


@pytest.fixture
def biased(tmp_path: Path) -> Layout:
    """A MiniMax-M2: routers with a selection bias, so that slots can be padded."""
    tensors = mixtral_tensors(EXPERTS)
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.block_sparse_moe.e_score_correction_bias"] = np.zeros(EXPERTS, np.float32)
    return sniff_layout(
        write_files(tmp_path / "biased", mixtral_config(EXPERTS) | {"model_type": "minimax_m2"}, tensors)
    )


def grouped_layout(path: Path, **keys: Any) -> Layout:
    tensors = {name.replace("block_sparse_moe", "mlp"): t for name, t in mixtral_tensors(EXPERTS).items()}
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = np.zeros(EXPERTS, np.float32)
    config = {
        "model_type": "deepseek_v3",
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 2,
        "hidden_size": 6,
    }
    return sniff_layout(write_files(path, config | keys, tensors))


def ladder() -> dict[int, list[float]]:
    """Layer 0 has the 16 lowest scores, layer 1 the 16 highest."""
    return {0: [float(e) for e in range(16)], 1: [100.0 + e for e in range(16)]}


@pytest.mark.parametrize(
    ("text", "number"), [("16B", 16 * 10**9), ("350M", 350 * 10**6), ("4.5b", 4_500_000_000), (1234, 1234)]
)
def test_parameter_targets_are_read(text: str | int, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("text", "number"), [("30GiB", 30 * 2**30), ("32GB", 32 * 10**9), ("1.5MiB", 3 * 2**19), ("4096", 4096), ("7B", 7)]
)
def test_size_targets_are_read(text: str, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    "demand", [{}, {"ratio": 0.5, "keep": 3}, {"ratio": 0.0}, {"ratio": 1.0}, {"target_size": "big"}]
)
def test_exactly_one_readable_budget(demand: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Budget.of(**demand)


@pytest.mark.parametrize(("ratio", "kept"), [(0.25, 12), (0.28, 12), (0.29, 11), (0.47, 8), (0.53, 8), (0.85, 2)])
def test_the_count_is_n_minus_the_rounded_share(layout: Layout, ratio: float, kept: int) -> None:
    plan = make_plan(layout, random_scores(layout), Budget.of(ratio=ratio))
    assert plan.n_after == kept
    assert {len(layer.keep) for layer in plan.layers} == {kept}
    assert plan.actual_ratio == pytest.approx(1 - kept / 16)


def test_the_lowest_scores_go_in_each_layer(layout: Layout) -> None:
    scores = random_scores(layout)
    plan = make_plan(layout, scores, Budget.of(keep=10))
    for layer in plan.layers:
        phi = scores.for_layer(layer.layer).phi
        assert sorted(layer.keep + layer.drop) == list(range(EXPERTS))
        assert min(phi[list(layer.keep)]) > max(phi[list(layer.drop)])


def test_impossible_counts_are_constraint_errors(layout: Layout) -> None:
    for demand in ({"keep": 1}, {"keep": 16}, {"ratio": 0.95}, {"ratio": 0.01}):
        with pytest.raises(ConstraintError):
            make_plan(layout, random_scores(layout), Budget.of(**demand))


def test_align_rounds_a_ratio_up_and_refuses_a_wrong_count(layout: Layout) -> None:
    plan = make_plan(layout, random_scores(layout), Budget.of(ratio=0.4), align=4)
    assert plan.n_after == 12
    assert any("instead of 40.0%" in warning for warning in plan.warnings)
    with pytest.raises(ConstraintError, match="--align 4"):
        make_plan(layout, random_scores(layout), Budget.of(keep=10), align=4)


@pytest.mark.parametrize("unit", ["target_params", "target_size"])
def test_targets_keep_as_many_as_fit(layout: Layout, unit: str, tmp_path: Path) -> None:
    """The bytes promised are the bytes written, and one more expert per layer would not have fitted."""
    whole = make_plan(layout, random_scores(layout), Budget.of(keep=9)).amounts
    expert = 2 * 60 * (4 if unit == "target_size" else 1)  # one expert in each of two layers
    target = (whole.bytes_after if unit == "target_size" else whole.parameters_after) + expert - 1
    plan = make_plan(layout, random_scores(layout), Budget.of(**{unit: target}))
    assert plan.n_after == 9
    apply_plan(layout.checkpoint.path, tmp_path / "out", plan)
    written = read_all(tmp_path / "out").values()
    assert sum(t.nbytes for t in written) == plan.amounts.bytes_after
    assert sum(t.size for t in written) == plan.amounts.parameters_after


def test_targets_that_cannot_be_met_say_what_can(layout: Layout) -> None:
    with pytest.raises(ConstraintError, match="already has only"):
        make_plan(layout, random_scores(layout), Budget.of(target_size="1TiB"))
    with pytest.raises(ConstraintError, match="even the smallest allowed result has 300 parameters"):
        make_plan(layout, random_scores(layout), Budget.of(target_params=299))


def test_a_global_target_counts_what_is_stored(layout: Layout) -> None:
    plan = make_plan(layout, scores_of(layout, ladder()), Budget.of(target_params=1300), allocation="global")
    assert plan.amounts.parameters_after <= 1300
    assert plan.export == "bounded"


def test_global_ranking_with_padding_keeps_the_best_overall(biased: Layout) -> None:
    plan = make_plan(biased, scores_of(biased, ladder()), RATIO, allocation="global")
    assert (plan.export, plan.n_after, plan.removed) == ("pad", 16, 8)
    assert [len(layer.keep) for layer in plan.layers] == [8, 16]
    assert plan.layers[0].keep == tuple(range(8, 16))
    assert any("as large as before" in warning for warning in plan.warnings)


def test_global_ranking_respects_the_floor(biased: Layout) -> None:
    plan = make_plan(biased, scores_of(biased, ladder()), Budget.of(ratio=0.75), allocation="global")
    assert [len(layer.keep) for layer in plan.layers] == [2, 6]
    assert plan.n_after == 6
    assert plan.amounts.parameters_after - plan.amounts.real_parameters == 4 * 61


def test_bounded_export_gives_every_layer_the_largest_count(layout: Layout) -> None:
    plan = make_plan(layout, scores_of(layout, ladder()), Budget.of(ratio=0.75), allocation="global")
    assert (plan.export, plan.n_after) == ("bounded", 6)
    assert [layer.keep for layer in plan.layers] == [tuple(range(10, 16))] * 2


def test_a_bounded_plan_that_removes_nothing_is_refused(layout: Layout) -> None:
    with pytest.raises(ConstraintError, match="removes nothing"):
        make_plan(layout, scores_of(layout, ladder()), RATIO, allocation="global")


def test_padding_without_a_selection_bias_is_refused(layout: Layout) -> None:
    with pytest.raises(ConstraintError, match="no selection bias"):
        make_plan(layout, random_scores(layout), RATIO, export="pad")


def test_a_plan_only_plan_is_not_applied(layout: Layout) -> None:
    plan = make_plan(layout, scores_of(layout, ladder()), RATIO, allocation="global", export="plan-only")
    assert [len(layer.keep) for layer in plan.layers] == [8, 16]
    with pytest.raises(ConstraintError, match="plan-only"):
        ready_plan(plan, layout)


def test_some_layers_only_needs_padding(layout: Layout, biased: Layout) -> None:
    with pytest.raises(ConstraintError, match="--layers would leave"):
        make_plan(layout, random_scores(layout), RATIO, layers=[1])
    plan = make_plan(biased, random_scores(biased), RATIO, layers=[1])
    assert [len(layer.keep) for layer in plan.layers] == [16, 12]
    with pytest.raises(UsageError, match=r"\[7\]"):
        make_plan(biased, random_scores(biased), RATIO, layers=[1, 7])


def test_protected_experts_stay(layout: Layout) -> None:
    phi = {0: [float(e) for e in range(16)], 1: [float(e) for e in range(16)]}
    plan = make_plan(layout, scores_of(layout, phi), Budget.of(keep=4), protect={(0, 1), (1, 0)})
    assert plan.layers[0].keep == (1, 13, 14, 15)
    assert plan.layers[1].keep == (0, 13, 14, 15)
    with pytest.raises(UsageError, match="--protect 0:16"):
        make_plan(layout, scores_of(layout, phi), RATIO, protect={(0, 16)})


def test_super_experts_are_the_extreme_ones_of_the_first_layers() -> None:
    def layer(index: int, **peaks: float) -> LayerScores:
        values = np.ones(100)
        for expert, peak in peaks.items():
            values[int(expert[1:])] = peak
        return LayerScores("", index, np.zeros(100), extra={"max_activation": values})

    layers = (layer(0, e3=1000.0), layer(1, e4=90.0), layer(2), layer(3, e5=2000.0))
    assert super_experts(ExpertScores("reap", layers)) == {(0, 3)}
    with pytest.raises(InputError, match="max_activation"):
        super_experts(ExpertScores("reap", (LayerScores("", 0, np.zeros(4)),)))


def test_groups_keep_equal_numbers_and_bound_the_count(tmp_path: Path) -> None:
    layout = grouped_layout(tmp_path / "grouped")
    plan = make_plan(layout, random_scores(layout), Budget.of(ratio=0.3))
    assert plan.n_after == 12  # 11 is not a multiple of n_group
    for layer in plan.layers:
        assert [sum(e // 4 == group for e in layer.keep) for group in range(4)] == [3] * 4
    with pytest.raises(ConstraintError, match="n_group = 4"):
        make_plan(layout, random_scores(layout), Budget.of(keep=10))
    assert make_plan(layout, random_scores(layout), Budget.of(keep=8)).n_after == 8
    with pytest.raises(ConstraintError, match="groups of at least 2"):
        make_plan(layout, random_scores(layout), Budget.of(keep=4))


def test_groups_offer_enough_experts_for_top_k(tmp_path: Path) -> None:
    layout = grouped_layout(tmp_path / "grouped", topk_group=1)
    with pytest.raises(ConstraintError, match="a token uses 4, from 1 of 4 groups of at least 4"):
        make_plan(layout, random_scores(layout), Budget.of(keep=12))


def test_scores_of_another_model_are_refused(layout: Layout) -> None:
    with pytest.raises(InputError, match="layer 1"):
        make_plan(layout, ExpertScores("x", (LayerScores("", 0, np.zeros(16)),)), RATIO)
    with pytest.raises(InputError, match="16 experts, but 8 scores"):
        make_plan(layout, scores_of(layout, {0: [0.0] * 8, 1: [0.0] * 8}), RATIO)


def test_a_plan_survives_the_file_and_has_equal_bytes(layout: Layout, tmp_path: Path) -> None:
    scores_file = save_scores(tmp_path / "scores", random_scores(layout))
    plans = [make_plan(layout, random_scores(layout), RATIO, scores_file=scores_file) for _ in range(2)]
    for name, plan in zip("ab", plans):
        save_plan(tmp_path / f"{name}.json", plan)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert check_plan(load_plan(tmp_path / "a.json"), layout) == plans[0]


def test_the_plan_file_holds_what_the_documentation_promises(layout: Layout, tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", make_plan(layout, random_scores(layout), RATIO))
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["schema"] == "xmac/prune-plan/1"
    assert document["source"].keys() == {"name", "config_sha256", "index_sha256"}
    assert (document["n_before"], document["n_after"], document["family"]) == (16, 12, "mixtral")
    assert document["ratio"] == {"requested": {"ratio": 0.25}, "actual": 0.25}
    assert document["layers"][0].keys() == {"name", "layer", "keep", "drop"}
    assert document["parameters"]["before"] == 60 + 2 * 16 * 60
    # one line per layer, so that people can edit it
    assert sum('"keep"' in line for line in (tmp_path / "plan.json").read_text().splitlines()) == 2


def edited(layout: Layout, path: Path, edit: Any) -> Path:
    save_plan(path, make_plan(layout, scores_of(layout, ladder()), RATIO))
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


def test_an_edited_plan_is_applied_as_edited(layout: Layout, tmp_path: Path) -> None:
    def swap(document: dict[str, Any]) -> None:
        document["layers"][0]["keep"] = [0, *range(5, 16)]
        del document["layers"][0]["drop"]

    path = edited(layout, tmp_path / "plan.json", swap)
    apply_plan(layout.checkpoint.path, tmp_path / "out", path)
    source, result = read_all(layout.checkpoint.path), read_all(tmp_path / "out")
    block = "model.layers.0.block_sparse_moe"
    for new, old in enumerate([0, *range(5, 16)]):
        name = "experts.{}.w2.weight"
        np.testing.assert_array_equal(result[f"{block}.{name.format(new)}"], source[f"{block}.{name.format(old)}"])
    np.testing.assert_array_equal(result[f"{block}.gate.weight"], source[f"{block}.gate.weight"][[0, *range(5, 16)]])


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda d: d["layers"][0].update(keep=[1, 0]), InputError, "ascending"),
        (lambda d: d["layers"][0].update(keep=[0, 99]), InputError, "from 0 to 15"),
        (lambda d: d["layers"][0].update(keep=list(range(12))), InputError, "`drop` of model.layers.0"),
        (lambda d: d["layers"][0].update(keep="all"), InputError, "list of expert ids"),
        (lambda d: d.update(export="zip"), InputError, "export must be"),
        (lambda d: d.pop("n_after"), InputError, "'n_after' is missing"),
        (lambda d: d["layers"].pop(), ConstraintError, "`layers`"),
        (lambda d: d.update(n_after=11), ConstraintError, "n_after is 11"),
        (lambda d: d.update(top_k=1), ConstraintError, "`top_k`"),
        (lambda d: d.update(n_before=17), InputError, "`drop`"),
        (lambda d: d.update(n_before=10**12), InputError, "n_before is 1000000000000"),
        (lambda d: d.update(n_after=float("inf")), InputError, "infinity"),
        (lambda d: d["layers"][0].update(layer=1), ConstraintError, "`layer numbers`"),
        (lambda d: d["source"].update(config_sha256="0"), ConstraintError, "another|made for"),
        (lambda d: d["source"].update(index_sha256="0"), ConstraintError, "index_sha256"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    layout: Layout, tmp_path: Path, edit: Any, error: type, message: str
) -> None:
    path = edited(layout, tmp_path / "plan.json", edit)
    with pytest.raises(error, match=message):
        check_plan(load_plan(path), layout)


@pytest.mark.parametrize("text", ["", "[" * 20_000, '{"a":' * 20_000 + "1" + "}" * 20_000, "\x00", "[1]"])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InputError, match=r"plan\.json"):
        load_plan(tmp_path / "plan.json")


def test_unequal_counts_are_refused_unless_padded(layout: Layout, biased: Layout) -> None:
    plan = make_plan(layout, random_scores(layout), RATIO)
    with pytest.raises(ConstraintError, match="keeps 11 experts, but n_after is 12"):
        with_keep(plan, layout, {0: plan.layers[0].keep[1:]})
    padded = make_plan(biased, random_scores(biased), RATIO, export="pad")
    assert len(with_keep(padded, biased, {0: padded.layers[0].keep[1:]}).layers[0].keep) == 11


def test_serving_counts_are_warned_about(layout: Layout) -> None:
    warnings = make_plan(layout, random_scores(layout), Budget.of(keep=12)).warnings
    assert any("compiled for fixed expert counts" in warning for warning in warnings)
    assert any("do not divide over 8" in warning for warning in warnings)
    assert make_plan(layout, random_scores(layout), Budget.of(keep=8)).warnings == (
        "8 experts do not divide over 16 expert-parallel devices",
    )
