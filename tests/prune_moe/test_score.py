"""The scoring job as a whole: every option runs, resumes exactly, and reports what its numbers are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shapley_fixture import EXPERTS, Fixture
from support.tiny_moe import build_tiny, probe_tokens
from support.token_batches import token_batch

from xmac_cli.cli.errors import InputError, ResumeMismatchError, UsageError, VerificationError
from xmac_cli.prune_moe.calibration_pass import calibrate
from xmac_cli.prune_moe.recon import ReconLayer
from xmac_cli.prune_moe.refine import refine_swaps
from xmac_cli.prune_moe.routing import moe_modules
from xmac_cli.prune_moe.score import score
from xmac_cli.prune_moe.score_options import CRITERIA, ScoreOptions, paper_options
from xmac_cli.prune_moe.scores import ExpertScores, LayerScores, load_scores, save_scores
from xmac_cli.prune_moe.shapley import exact_shapley
from xmac_cli.prune_moe.values import ModelGame

LENGTHS = [12, 12, 9]


@pytest.fixture(scope="module")
def case():
    return build_tiny("mixtral"), token_batch(probe_tokens(), LENGTHS)


def phi_of(scores: ExpertScores) -> np.ndarray:
    return np.concatenate([layer.phi for layer in scores.layers])


@pytest.mark.parametrize("criterion", [name for name in CRITERIA if name != "from-file"])
def test_every_criterion_scores_every_expert(case, criterion: str, tmp_path: Path):
    model, batch = case
    scores = score(model, batch, ScoreOptions(criterion=criterion, keep=4))
    assert scores.criterion == criterion
    assert [layer.layer for layer in scores.layers] == [0, 1, 2]
    assert len(set(phi_of(scores))) > 1
    assert {"freq", "gate_mean", "reap", "ean", "max_activation"} <= set(scores.layers[0].extra)
    saved = load_scores(save_scores(tmp_path, scores).parent)
    np.testing.assert_array_equal(phi_of(saved), phi_of(scores))


def test_the_default_is_reconstruction_with_a_telescoping_identity(case):
    model, batch = case
    scores = score(model, batch, ScoreOptions())
    found = scores.metadata["diagnostics"]
    assert found["v_full"] == pytest.approx(1.0)
    assert found["telescoping_error"] < 1e-9
    assert found["permutations"] == 20
    assert 0 < found["share_of_marginals_known"] < 1
    assert scores.metadata["kernel_backend"] == "numba"
    assert scores.metadata["convergence"][-1][0] == 20


def test_exact_layer_scores_are_the_enumerated_games(case):
    model, batch = case
    scores = score(model, batch, ScoreOptions(scope="layer", sampler="exact"))
    for layer, statistics in zip(scores.layers, calibrate(model, batch, moe_modules(model), keep_inputs=True)):
        want = exact_shapley(None, 8, value_fn_batch=ReconLayer(statistics).values).phi
        np.testing.assert_allclose(layer.phi, want, rtol=1e-9)
        np.testing.assert_array_equal(layer.se, 0.0)
    everywhere = score(model, batch, ScoreOptions(scope="global", sampler="exact"))
    assert phi_of(everywhere).sum() == pytest.approx(1.0)  # efficiency: V(all) = 1, V(nobody) = 0
    sampled = score(model, batch, ScoreOptions(sampler="antithetic", permutations=400, truncate=0.0))
    errors = np.concatenate([layer.se for layer in sampled.layers])
    assert (np.abs(phi_of(sampled) - phi_of(everywhere)) < 5 * errors + 1e-6).all()


def test_exact_layer_game_on_perplexity_is_the_enumerated_one(case):
    model, batch = case
    scores = score(model, batch, ScoreOptions(value="ppl", scope="layer", sampler="exact"))
    modules = moe_modules(model)
    game = ModelGame(model, batch, modules, layer=modules[1])
    np.testing.assert_allclose(
        scores.layers[1].phi, exact_shapley(None, 8, value_fn_batch=game.values).phi, rtol=1e-6, atol=1e-10
    )


def test_the_exact_score_of_the_enumerated_fixture_comes_out_of_the_whole_job(enumerated_game: Fixture):
    """Twelve players, so `--sampler exact` on the global perplexity game evaluates all 4,096 masked models."""
    batch = token_batch(enumerated_game.calibration[:2])
    scores = score(enumerated_game.model, batch, ScoreOptions(value="ppl", sampler="exact", batch_tokens=16384))
    game = ModelGame(enumerated_game.model, batch, moe_modules(enumerated_game.model), batch_tokens=16384)
    full, empty = game.values(np.stack([np.ones(12, dtype=bool), np.zeros(12, dtype=bool)]))
    assert phi_of(scores).sum() == pytest.approx(full - empty, rel=1e-6)
    assert scores.metadata["diagnostics"]["coalitions_evaluated"] == 2**12
    assert len(scores.layers[0].phi) == EXPERTS


RUNS: list[dict[str, Any]] = [
    {"value": "ppl", "permutations": 6},
    {"value": "nll", "permutations": 6, "sampler": "antithetic", "truncate": 0.0},
    {"value": "kl", "permutations": 4, "scope": "layer", "sampler": "uniform"},
    {"value": "ppl", "permutations": 4, "rgis_weights": "full", "rgis_mix": 0.0, "self_normalize": False},
    {"value": "recon", "permutations": 6, "rgis_temper": "auto"},
]


@pytest.mark.parametrize("options", RUNS, ids=lambda o: "-".join(map(str, o.values())))
def test_an_interrupted_run_continues_to_identical_numbers(case, options: dict[str, Any], tmp_path: Path):
    model, batch = case
    settings = ScoreOptions(**options, batch_tokens=40)
    whole = score(model, batch, settings)

    class Killed(Exception):
        pass

    class Progress:
        """Stops the run after the third batch of permutations."""

        def __init__(self) -> None:
            self.left = 3

        def task(self, description: str, total: float | None, unit: str = "") -> Any:
            from xmac_cli.cli.progress import NullProgress

            return NullProgress().task(description, total, unit)

        def metric(self, values: Any) -> None:
            self.left -= 1
            if not self.left:
                raise Killed

        def note(self, text: str) -> None: ...

    if options["value"] != "recon":  # all permutations of a reconstruction game are one batch
        with pytest.raises(Killed):
            score(model, batch, settings, state_dir=tmp_path, progress=Progress())
        assert list(tmp_path.glob("game-*.npz"))
    resumed = score(model, batch, settings, state_dir=tmp_path, resume=True)
    again = score(model, batch, settings, state_dir=tmp_path, resume=True)
    for other in (resumed, again):
        np.testing.assert_array_equal(phi_of(other), phi_of(whole))
        for first, second in zip(whole.layers, other.layers):
            np.testing.assert_array_equal(first.se, second.se)
            np.testing.assert_array_equal(first.evals, second.evals)
        assert other.metadata["diagnostics"] == whole.metadata["diagnostics"]


def test_a_state_of_another_run_is_refused_and_named(case, tmp_path: Path):
    model, batch = case
    score(model, batch, ScoreOptions(permutations=4), state_dir=tmp_path)
    with pytest.raises(ResumeMismatchError, match="another truncate"):
        score(model, batch, ScoreOptions(permutations=4, truncate=0.3), state_dir=tmp_path, resume=True)
    other = token_batch(probe_tokens(seed=8), LENGTHS)
    with pytest.raises(ResumeMismatchError, match="tokens_sha256"):
        score(model, other, ScoreOptions(permutations=4), state_dir=tmp_path, resume=True)
    with pytest.raises(ResumeMismatchError, match="model_fingerprint"):
        score(model, batch, ScoreOptions(permutations=4), state_dir=tmp_path, resume=True, model_fingerprint="x")


def test_a_damaged_state_is_refused(case, tmp_path: Path):
    model, batch = case
    score(model, batch, ScoreOptions(permutations=4), state_dir=tmp_path)
    (tmp_path / "game-global.npz").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(ResumeMismatchError, match="damaged"):
        score(model, batch, ScoreOptions(permutations=4), state_dir=tmp_path, resume=True)


def test_without_resume_an_old_state_is_dropped(case, tmp_path: Path):
    model, batch = case
    score(model, batch, ScoreOptions(permutations=4, value="ppl"), state_dir=tmp_path)
    fresh = score(model, batch, ScoreOptions(permutations=4, value="ppl", seed=1), state_dir=tmp_path)
    assert fresh.metadata["diagnostics"]["permutations"] == 4
    np.testing.assert_array_equal(
        phi_of(fresh), phi_of(score(model, batch, ScoreOptions(permutations=4, value="ppl", seed=1)))
    )


def test_the_same_seed_gives_the_same_scores_and_another_one_others(case):
    model, batch = case
    first, again, other = (phi_of(score(model, batch, ScoreOptions(permutations=6, seed=seed))) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_published_setting(case):
    model, batch = case
    options = paper_options()
    assert (options.value, options.scope, options.sampler) == ("ppl", "global", "rgis")
    assert (options.rgis_weights, options.rgis_mix, options.rgis_temper) == ("full", 0.0, 1.0)
    assert (options.permutations, options.truncate, options.self_normalize) == (20, 0.5, False)
    scores = score(model, batch, options)
    assert scores.metadata["diagnostics"]["ess_share"] < 0.25
    assert any("effective sample" in text for text in scores.metadata["warnings"])


def test_null_moves_save_passes_and_change_nothing(case, monkeypatch: pytest.MonkeyPatch):
    model = build_tiny("mixtral", num_experts=24)
    batch = token_batch(probe_tokens(batch=1))
    options = ScoreOptions(value="ppl", permutations=4, truncate=0.0)
    short = score(model, batch, options)
    assert short.metadata["null_move_exact"] == {"0": True, "1": True, "2": True}
    monkeypatch.setattr(ModelGame, "has_null_moves", False)
    plain = score(model, batch, options)
    np.testing.assert_allclose(phi_of(short), phi_of(plain), atol=1e-8)
    saved = [s.metadata["diagnostics"]["coalitions_evaluated"] for s in (short, plain)]
    assert saved[0] < 0.8 * saved[1]


def test_layers_without_exact_null_moves_say_so():
    scores = score(build_tiny("qwen2_moe"), token_batch(probe_tokens()), ScoreOptions(criterion="frequency"))
    assert set(scores.metadata["null_move_exact"].values()) == {False}


def test_scores_from_a_file_must_fit_the_model(case, tmp_path: Path):
    model, batch = case
    made = score(model, batch, ScoreOptions(criterion="reap"))
    path = save_scores(tmp_path / "good", made)
    loaded = score(model, batch, ScoreOptions(criterion="from-file", scores_file=path))
    np.testing.assert_array_equal(phi_of(loaded), phi_of(made))
    short = ExpertScores("reap", tuple(LayerScores(s.name, s.layer, s.phi[:4]) for s in made.layers))
    wrong = save_scores(tmp_path / "bad", short)
    with pytest.raises(InputError, match="scores 4 experts in layer 0, the model has 8"):
        score(model, batch, ScoreOptions(criterion="from-file", scores_file=wrong))


def test_contradictory_options_are_refused():
    with pytest.raises(UsageError, match="unknown criterion"):
        ScoreOptions(criterion="magic")
    with pytest.raises(UsageError, match="NAEE"):
        ScoreOptions(criterion="naee")
    with pytest.raises(UsageError, match="score file"):
        ScoreOptions(criterion="from-file")


def test_exact_enumeration_of_a_large_global_game_is_refused(case):
    model, batch = case
    with pytest.raises(UsageError, match="24 players"):
        score(model, batch, ScoreOptions(value="ppl", sampler="exact"))


def test_swap_refinement_keeps_sizes_and_only_accepts_what_raises_the_value(enumerated_game: Fixture):
    class Game:
        num_players = 12

        def values(self, masks: np.ndarray) -> np.ndarray:
            return enumerated_game.values(masks)

    modules = moe_modules(enumerated_game.model)
    frequency = enumerated_game.frequency
    layers = tuple(LayerScores(m.name, m.layer, frequency[6 * i : 6 * i + 6].copy()) for i, m in enumerate(modules))
    kept = {m.layer: np.argsort(-frequency[6 * i : 6 * i + 6], kind="stable")[:3] for i, m in enumerate(modules)}
    scores = ExpertScores("frequency", layers)
    few = refine_swaps(kept, scores, Game(), modules, 3)
    many = refine_swaps(kept, scores, Game(), modules, 18)
    assert few.value_before <= few.value_after <= many.value_after
    assert many.value_after > many.value_before
    assert len(few.swaps) == 3
    for result in (few, many):
        assert {layer: len(ids) for layer, ids in result.kept.items()} == {0: 3, 1: 3}
        mask = np.zeros(12, dtype=bool)
        for layer, ids in result.kept.items():
            mask[[6 * layer + e for e in ids]] = True
        assert enumerated_game.values(mask[None])[0] == result.value_after
    value = many.value_before
    for swap in many.swaps:
        assert swap.accepted == (swap.value > value)
        value = swap.value if swap.accepted else value


def test_swap_refinement_leaves_protected_experts_and_groups_alone():
    model = build_tiny("deepseek_v3")
    modules = moe_modules(model)

    class Game:
        num_players = 16

        def values(self, masks: np.ndarray) -> np.ndarray:
            return masks @ np.arange(16.0)

    layers = tuple(LayerScores(m.name, m.layer, np.arange(8.0)) for m in modules)
    kept = {m.layer: [0, 1, 4, 5] for m in modules}
    result = refine_swaps(
        kept, ExpertScores("x", layers), Game(), modules, 50, protect=frozenset({(modules[0].layer, 0)})
    )
    assert result.kept[modules[0].layer] == [0, 3, 6, 7]
    assert result.kept[modules[1].layer] == [2, 3, 6, 7]


@pytest.mark.parametrize("criterion", ["shapley", "reap", "frequency"])
@pytest.mark.parametrize("part", ["embed_tokens.weight", "layers.1.mlp.gate.weight", "layers.1.mlp.experts.down_proj"])
def test_weights_that_are_no_numbers_are_never_turned_into_scores(criterion: str, part: str):
    model = build_tiny("mixtral")
    broken = [weights for name, weights in model.named_parameters() if name.endswith(part)]
    assert len(broken) == 1
    broken[0].data[:] = torch.nan
    with pytest.raises(VerificationError, match="not finite on the calibration text"):
        score(model, token_batch(probe_tokens(), LENGTHS), ScoreOptions(criterion=criterion, permutations=2))
