"""How experts are scored: the options of `score` as data, and the published setting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from xmac_cli.cli.errors import UsageError
from xmac_cli.prune_moe.option_texts import parse_temper
from xmac_cli.prune_moe.options import CRITERIA, PAPER

Value = Literal["recon", "ppl", "nll", "kl"]


@dataclass(frozen=True)
class ScoreOptions:
    """What is measured and how.

    Args:
        criterion: `shapley` or a baseline, see baselines.py.
        value: value of a coalition, for `shapley` and `loo`.
        scope: one game over the experts of all layers, or one game per layer with the other layers intact.
        sampler: how permutations are drawn; `exact` enumerates all coalitions of at most 16 players.
        rgis_weights, rgis_mix, rgis_temper: see sampling.SamplerOptions.
        permutations: M.
        truncate: tau.
        self_normalize: divide by the sum of weights instead of M.
        seed: of every random draw.
        batch_tokens: tokens per forward pass, over all coalitions in it.
        keep: experts to keep per layer; only `naee` needs it.
        scores_file: where `from-file` reads.
        backend: of the coalition kernel, None = automatic.
    """

    criterion: str = "shapley"
    value: Value = "recon"
    scope: Literal["global", "layer"] = "global"
    sampler: Literal["rgis", "uniform", "antithetic", "exact"] = "rgis"
    rgis_weights: Literal["prefix", "full", "none"] = "prefix"
    rgis_mix: float = 0.3
    rgis_temper: float | Literal["auto"] = 1.0
    permutations: int = 20
    truncate: float = 0.5
    self_normalize: bool = True
    seed: int = 0
    batch_tokens: int = 8192
    keep: int | None = None
    scores_file: Path | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise UsageError(f"unknown criterion '{self.criterion}'", hint=f"choose one of {', '.join(CRITERIA)}")
        if self.criterion == "naee" and self.keep is None:
            raise UsageError("NAEE searches for a subset of given size and needs to know how many experts are kept")
        if self.criterion == "from-file" and self.scores_file is None:
            raise UsageError("criterion 'from-file' needs a score file")

    def as_json(self) -> dict[str, Any]:
        """The options as JSON-able values, without those that cannot change the result."""
        values = {name: value for name, value in vars(self).items() if name not in ("scores_file", "backend")}
        return values | {"scores_file": str(self.scores_file) if self.scores_file else None}


def paper_options(**changes: Any) -> ScoreOptions:
    """The published setting (Huang et al., NeurIPS 2025, Algorithm 1): `--preset paper`."""
    published = {name: value for name, value in PAPER.items() if name != "allocation"}
    published["rgis_temper"] = parse_temper(published["rgis_temper"])
    return replace(ScoreOptions(**published), **changes)
