"""Every option of `xmac prune-moe`, grouped by the stage that reads it: score, plan, apply, compare.

Defaults are ours unless the help says "paper"; `--preset paper` sets the published method (Shapley-MoE, NeurIPS 2025,
Algorithm 1): global game on 1/PPL, router-guided importance sampling with full weights, M = 20, tau = 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.options import Option

_BUDGET, _CALIB, _SCORE = "Budget: exactly one", "Calibration", "Scores"
_SHAPLEY, _PLAN, _APPLY, _COMPARE = "Shapley estimator", "Plan", "Apply", "Compare"

CRITERIA = (
    "shapley",
    "frequency",
    "gate",
    "expert-trim",
    "ean",
    "reap",
    "man",
    "msan",
    "random",
    "loo",
    "naee",
    "greedy",
    "from-file",
)

# Criteria that are sums over the tokens of one calibration pass.
STATISTIC_CRITERIA = ("frequency", "gate", "expert-trim", "ean", "reap", "man", "msan")

PAPER: Mapping[str, Any] = {
    "criterion": "shapley",
    "value": "ppl",
    "scope": "global",
    "sampler": "rgis",
    "rgis_weights": "full",
    "rgis_mix": 0.0,
    "rgis_temper": "1.0",
    "self_normalize": False,
    "permutations": 20,
    "truncate": 0.5,
    "allocation": "global",
}

Options = TypeVar("Options", bound="PruneOptions")


@dataclass(frozen=True)
class PruneOptions:
    """The options as data; `xmac_cli.prune_moe.command` runs them."""

    stage: Annotated[
        Literal["all", "score", "plan", "apply", "compare"],
        Option("all = score, plan, apply; compare = masked perplexity of several criteria, nothing is written"),
    ] = "all"
    preset: Annotated[Literal["default", "paper"], Option("paper = the published setting")] = "default"

    ratio: Annotated[float | None, Option("share of routed experts to remove", ge=0, lt=1, panel=_BUDGET)] = None
    keep: Annotated[int | None, Option("experts to keep in each layer", ge=1, panel=_BUDGET)] = None
    target_params: Annotated[str | None, Option("parameters to end with, as 16B", panel=_BUDGET)] = None
    target_size: Annotated[str | None, Option("size of the weights to end with, as 30GiB", panel=_BUDGET)] = None

    calib: Annotated[
        tuple[Path, ...], Option("calibration text: jsonl, txt, parquet or token-id safetensors", panel=_CALIB)
    ] = ()
    calib_weights: Annotated[tuple[float, ...], Option("share of each --calib file", gt=0, panel=_CALIB)] = ()
    calib_samples: Annotated[int, Option("sequences; the paper takes 128", ge=1, panel=_CALIB)] = 16
    calib_seqlen: Annotated[int, Option("tokens in a sequence; NAEE takes 2048", ge=2, panel=_CALIB)] = 512
    calib_packing: Annotated[
        Literal["pack", "document"], Option("blocks across documents, or one document a sequence", panel=_CALIB)
    ] = "pack"
    chat_template: Annotated[bool, Option("render `messages` with the chat template", panel=_CALIB)] = False

    criterion: Annotated[str, Option("what decides importance", choices=CRITERIA, metavar="NAME", panel=_SCORE)] = (
        "shapley"
    )
    scores: Annotated[Path | None, Option("use the scores in this directory", metavar="DIR", panel=_SCORE)] = None
    scores_out: Annotated[
        Path | None,
        Option("keep the scores here; OUTPUT of --stage score", metavar="DIR", panel=_SCORE, identity=False),
    ] = None
    batch_tokens: Annotated[
        int, Option("tokens in one forward pass, over all coalitions in it", ge=1, panel=_SCORE)
    ] = 8192

    value: Annotated[
        Literal["recon", "ppl", "nll", "kl"],
        Option("the game: recon = layer-local reconstruction, ppl = 1/perplexity as in the paper", panel=_SHAPLEY),
    ] = "recon"
    scope: Annotated[
        Literal["global", "layer"], Option("one game over all layers as in the paper, or one per layer", panel=_SHAPLEY)
    ] = "global"
    sampler: Annotated[
        Literal["rgis", "uniform", "antithetic", "exact"], Option("how permutations are drawn", panel=_SHAPLEY)
    ] = "rgis"
    rgis_weights: Annotated[
        Literal["prefix", "full", "none"], Option("importance weights; the paper's are full", panel=_SHAPLEY)
    ] = "prefix"
    rgis_mix: Annotated[float, Option("share of uniform permutations; 0 in the paper", ge=0, le=1, panel=_SHAPLEY)] = (
        0.3
    )
    rgis_temper: Annotated[str, Option("exponent on the routing frequencies, or auto", panel=_SHAPLEY)] = "1.0"
    permutations: Annotated[int, Option("permutations drawn, M in the paper", ge=1, short="-M", panel=_SHAPLEY)] = 20
    truncate: Annotated[
        float, Option("tau: stop a permutation below this share of V(all); 0 = never", ge=0, lt=1, panel=_SHAPLEY)
    ] = 0.5
    self_normalize: Annotated[bool, Option("divide by the sum of weights instead of M", panel=_SHAPLEY)] = True

    allocation: Annotated[
        Literal["uniform", "global"], Option("one count for all layers, or one ranking over all", panel=_PLAN)
    ] = "uniform"
    export: Annotated[
        Literal["auto", "pad", "bounded", "plan-only"],
        Option("how unequal counts are stored: padded slots, or every layer at the largest count", panel=_PLAN),
    ] = "auto"
    align: Annotated[int, Option("round the count up to a multiple of this", ge=1, panel=_PLAN)] = 1
    protect: Annotated[tuple[str, ...], Option("never drop: LAYER:EXPERT[,...]", panel=_PLAN)] = ()
    protect_super: Annotated[bool, Option("never drop experts with extreme activations", panel=_PLAN)] = False
    layers: Annotated[str | None, Option("only these layers, as 0-3,7; needs padding", panel=_PLAN)] = None
    refine_swaps: Annotated[int, Option("exchanges to try after the ranking", ge=0, panel=_PLAN)] = 0
    mtp: Annotated[
        Literal["slice", "drop", "keep"], Option("what happens to multi-token-prediction layers", panel=_PLAN)
    ] = "slice"
    plan_file: Annotated[Path | None, Option("apply this plan.json", flag="--plan", metavar="FILE", panel=_PLAN)] = None
    plan_out: Annotated[Path | None, Option("write plan.json here", metavar="FILE", panel=_PLAN, identity=False)] = None

    verify: Annotated[
        Literal["none", "files", "block", "logits"],
        Option("check the result: bytes, one MoE layer at a time, or the whole model", panel=_APPLY),
    ] = "files"
    shards: Annotated[
        str | None, Option("only part I of N of the shards, as 1/4", metavar="I/N", panel=_APPLY, identity=False)
    ] = None

    eval_data: Annotated[tuple[Path, ...], Option("held-out text, one file a domain", panel=_COMPARE)] = ()
    eval_tokens: Annotated[int, Option("tokens of each --eval-data file", ge=2, panel=_COMPARE)] = 16384
    ratios: Annotated[tuple[float, ...], Option("removed shares to compare", gt=0, lt=1, panel=_COMPARE)] = (
        0.25,
        0.5,
        0.67,
    )
    criteria: Annotated[
        tuple[str, ...],
        Option("criterion, or shapley:GAME[:PERMUTATIONS]", metavar="NAME", panel=_COMPARE),
    ] = ("shapley:recon", "shapley:ppl", "reap", "frequency", "naee", "random")
    random_seeds: Annotated[int, Option("seeds of the random baseline", ge=1, panel=_COMPARE)] = 3


def with_preset(options: Options) -> Options:
    """Apply `--preset`: its values replace defaults, and the result has nothing left to apply.

    Raises:
        UsageError: an option was given a value that contradicts the preset.
    """
    if options.preset == "default":
        return options
    defaults = {field.name: field.default for field in fields(options)}
    for name, value in PAPER.items():
        current = getattr(options, name)
        if current not in (defaults[name], value):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"--preset paper means {flag} {value}, but {flag} {current} was given", "drop one of them")
    return replace(options, preset="default", **PAPER)
