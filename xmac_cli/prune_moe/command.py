"""`xmac prune-moe`: options to stages. The method is in the modules beside this one; docs/prune-moe.md tells which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.prune_moe.option_texts import parse_layers, parse_protected, parse_share, parse_temper
from xmac_cli.prune_moe.options import PruneOptions, with_preset

if TYPE_CHECKING:
    from xmac_cli.report.schema import Report

_WRITES = {"all": "checkpoint", "score": "directory", "plan": None, "apply": "checkpoint", "compare": None}


@dataclass(frozen=True)
class PruneMoe(PruneOptions, Verb):
    """Remove routed experts of a mixture-of-experts checkpoint, by Shapley value or another criterion.

    The result is an ordinary smaller checkpoint that computes exactly what the original computes with the removed
    experts masked. Example: xmac prune-moe SRC DST --ratio 0.25 --calib data.jsonl
    """

    name: ClassVar[str] = "prune-moe"
    reads: ClassVar[str | None] = "checkpoint"
    writes: ClassVar[str | None] = "checkpoint"

    def check(self) -> None:
        """Rules between options; see docs/prune-moe.md."""
        with_preset(self)
        parse_protected(self.protect)
        parse_layers(self.layers)
        parse_temper(self.rgis_temper)
        if parse_share(self.shards) is not None and self.stage != "apply":
            raise UsageError("--shards splits --stage apply", "make the plan first, then let every job apply its share")
        if self.calib_weights and len(self.calib_weights) != len(self.calib):
            raise UsageError(f"{len(self.calib_weights)} --calib-weights for {len(self.calib)} --calib files")
        if self.plan_file is not None and self.stage != "apply":
            raise UsageError(
                f"--plan says which experts stay, and --stage {self.stage} would decide it anew",
                "add --stage apply, or leave --plan away",
            )
        if self.criterion == "from-file" and self.scores is None and self.stage in ("all", "plan"):
            raise UsageError("--criterion from-file needs --scores DIR")

    def output_kind(self) -> str | None:
        """Only `all`, `apply` and `score` write an OUTPUT."""
        return _WRITES[self.stage]

    def default_output(self) -> Path | None:
        """--scores-out is another name for the OUTPUT of --stage score."""
        return self.scores_out if self.stage == "score" else None

    def shares(self) -> tuple[int, int] | None:
        """--shards."""
        return parse_share(self.shards)

    def execute(self, job: Job) -> Report:
        """Run the stage."""
        from xmac_cli.prune_moe import comparing, stages

        run = {
            "all": stages.run_all,
            "score": stages.run_score,
            "plan": stages.run_plan,
            "apply": stages.run_apply,
            "compare": comparing.run_compare,
        }[self.stage]
        return run(with_preset(self), job)

    def assist(self, job: Job) -> None:
        """Take part in scoring."""
        from xmac_cli.prune_moe import comparing, stages

        if self.stage == "compare":
            comparing.run_compare(with_preset(self), job)
        elif self.stage in ("all", "score"):
            stages.assist_scoring(with_preset(self), job)

    def plan(self, source: Path | None) -> Report:
        """--dry-run, from headers only."""
        from xmac_cli.prune_moe.stages import preview

        if source is None:
            raise UsageError("INPUT is missing")
        return preview(with_preset(self), source)
