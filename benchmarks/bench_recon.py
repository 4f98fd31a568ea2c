"""Coalition evaluations per second: reconstruction from Gram matrices against plain masked forward passes, in one run.

Also: do both games rank the experts alike? Model: the demo MoE (built on first use), or the checkpoint and calibration
text named by XMAC_BENCH_MODEL and XMAC_BENCH_CALIB; XMAC_BENCH_DEMO=tiny takes the small demo. Threads: torch's.
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from xmac_cli.data.calibration import CalibrationOptions
from xmac_cli.models.demo_cache import cached_demo_moe
from xmac_cli.models.loading import load_model, load_tokenizer
from xmac_cli.prune_moe.calibration_pass import calibrate
from xmac_cli.prune_moe.moe_blocks import MoEModule, moe_modules
from xmac_cli.prune_moe.rank_correlation import spearman
from xmac_cli.prune_moe.recon import ReconGame, ReconLayer
from xmac_cli.prune_moe.sampling import PermutationSampler, SamplerOptions
from xmac_cli.prune_moe.score import score
from xmac_cli.prune_moe.score_options import ScoreOptions
from xmac_cli.prune_moe.values import ModelGame

SAMPLES, SEQLEN = 16, 128
PERMUTATIONS = 20
GOAL = 20.0


def find_model() -> tuple[Path, list[Path]]:
    """(checkpoint, calibration files)."""
    named = os.environ.get("XMAC_BENCH_MODEL")
    if named:
        return Path(named), [Path(os.environ["XMAC_BENCH_CALIB"])]
    demo = cached_demo_moe(size=os.environ.get("XMAC_BENCH_DEMO", "demo"))
    return demo.model, list(demo.calibration.values())


def per_second(action, masks: np.ndarray, rounds: int) -> float:  # type: ignore[no-untyped-def]
    """Coalitions per second, median over rounds after one round of warm-up."""
    action(masks)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        action(masks)
        seconds.append(time.perf_counter() - start)
    return len(masks) / statistics.median(seconds)


def walk_rate(model: torch.nn.Module, batch, modules: list[MoEModule]) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Coalitions per second along permutations, with and without making the Gram matrices."""
    statistics_of = calibrate(model, batch, modules, norms=False, keep_inputs=True)
    start = time.perf_counter()
    layers = [ReconLayer(layer) for layer in statistics_of]
    for layer in layers:
        layer.values(np.ones((1, layer.entry.num_experts), dtype=bool))
    building = time.perf_counter() - start
    game = ReconGame(layers)
    sampler = PermutationSampler(game.num_players, PERMUTATIONS, SamplerOptions("uniform"))
    orders = [sampler.draw(index) for index in range(PERMUTATIONS)]
    masks = np.ones((PERMUTATIONS, game.num_players), dtype=bool)
    start = time.perf_counter()
    for step in range(game.num_players):
        for mask, order in zip(masks, orders):
            mask[order[step]] = False
        game.values(masks)
    walking = time.perf_counter() - start
    count = PERMUTATIONS * game.num_players
    return count / walking, count / (walking + building)


def main() -> None:
    """Print the rates, their ratios, and the rank correlation."""
    checkpoint, files = find_model()
    model, tokenizer = load_model(checkpoint, device="cpu", dtype="float32"), load_tokenizer(checkpoint)
    batch = CalibrationOptions(samples=SAMPLES, seqlen=SEQLEN).load(files, tokenizer)
    modules = moe_modules(model)
    experts = "+".join(str(entry.num_experts) for entry in modules)
    print(f"{checkpoint.name}: experts {experts}, {batch.tokens} calibration tokens, {torch.get_num_threads()} threads")

    game = ModelGame(model, batch, modules, null_moves=False)
    rng = np.random.default_rng(0)
    plain = per_second(game.values, rng.random((4, game.num_players)) < 0.6, rounds=3)
    layers = [ReconLayer(layer) for layer in calibrate(model, batch, modules, norms=False, keep_inputs=True)]

    def from_nothing(masks: np.ndarray) -> None:
        ReconGame(layers).values(masks)  # a new game has no memory: every layer of every coalition is evaluated

    unrelated = per_second(from_nothing, rng.random((64, game.num_players)) < 0.6, rounds=5)
    walking, with_building = walk_rate(model, batch, modules)
    print(f"masked forward pass                        {plain:12.1f} coalitions/s")
    for label, rate in (
        ("recon, unrelated coalitions", unrelated),
        ("recon, along permutations", walking),
        ("recon, along permutations, all included", with_building),
    ):
        print(f"{label:42} {rate:12.1f} coalitions/s   {rate / plain:8.1f} x")
    verdict = "met" if with_building >= GOAL * plain else "missed"
    print(f"goal of {GOAL:.0f} x with everything included: {verdict}")

    phi = {
        value: np.concatenate(
            [
                layer.phi
                for layer in score(model, batch, ScoreOptions(value=value, permutations=PERMUTATIONS)).layers  # type: ignore[arg-type]
            ]
        )
        for value in ("recon", "ppl")
    }
    print(f"Spearman of recon and ppl over all experts   {spearman(phi['recon'], phi['ppl']):.3f}")
    bounds = np.cumsum([0] + [entry.num_experts for entry in modules])
    inside = [spearman(phi["recon"][a:b], phi["ppl"][a:b]) for a, b in pairwise(bounds)]
    print(f"Spearman within each layer                   {', '.join(f'{value:.2f}' for value in inside)}")


if __name__ == "__main__":
    main()
