"""`xmac eval-ppl`: options and report; the method is in evaluation.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.options import Option
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.report.schema import Report, Table

if TYPE_CHECKING:
    from xmac_cli.eval_ppl.evaluation import DomainScore, PerplexityOptions


@dataclass(frozen=True)
class EvalPpl(Verb):
    """Perplexity of a checkpoint by document and by domain, with intervals.

    Every --data file is one domain. Documents are scored one by one with a sliding window; the total is weighted by
    tokens. stdout repeats INPUT, so that a chain can go on.
    """

    name: ClassVar[str] = "eval-ppl"
    reads: ClassVar[str | None] = "checkpoint"
    writes: ClassVar[str | None] = None

    data: Annotated[
        tuple[Path, ...],
        Option("text, jsonl, parquet or token file; each is one domain", short="-d", metavar="FILE"),
    ] = ()
    window: Annotated[
        int | None, Option("most tokens in one pass (default: the model's longest input, at most 2048)", ge=2)
    ] = None
    stride: Annotated[int | None, Option("tokens the window moves on by (default: half the window)", ge=1)] = None
    bos: Annotated[
        Literal["auto", "always", "never"], Option("whether a beginning-of-text token opens every document")
    ] = "auto"
    chat_template: Annotated[bool, Option("render rows through the tokenizer's chat template")] = False
    max_documents: Annotated[int | None, Option("documents taken from each file", ge=1)] = None
    batch_size: Annotated[int, Option("windows per forward pass", ge=1)] = 8
    bootstrap: Annotated[int, Option("bootstrap replicates for the intervals; 0 for none", ge=0)] = 1000
    per_document: Annotated[bool, Option("list every document in the JSON report")] = False

    def check(self) -> None:
        if self.window is not None and self.stride is not None and self.stride >= self.window:
            raise UsageError(f"--stride ({self.stride}) must be smaller than --window ({self.window})")

    def execute(self, job: Job) -> Report:
        from xmac_cli.eval_ppl.evaluation import evaluate_files, window_and_stride
        from xmac_cli.models.loading import load_model, load_tokenizer

        options = self._options(job.seed)
        trust = job.settings.trust_remote_code
        tokenizer = load_tokenizer(job.checkpoint, trust_remote_code=trust)
        model = load_model(job.checkpoint, device=job.device, dtype=job.dtype, trust_remote_code=trust)
        domains = evaluate_files(model, tokenizer, self.data, options, job.progress)
        window, stride = window_and_stride(model, options)
        return self._report(domains, options, window, stride)

    def plan(self, source: Path | None) -> Report:
        from xmac_cli.checkpoint.directory import Checkpoint
        from xmac_cli.data.documents import read_documents

        if source is None or not self.data:
            raise UsageError("eval-ppl needs INPUT and at least one --data FILE")
        parameters = Checkpoint.open(source).total_parameters
        rows = [[d.name, len(d), d.path.stat().st_size] for d in map(read_documents, self.data)]
        result = {"parameters": parameters, "files": [{"name": n, "documents": c, "bytes": b} for n, c, b in rows]}
        return Report(result=result, tables=[Table("would score", ["domain", "documents", "bytes"], rows)])

    def _options(self, seed: int) -> PerplexityOptions:
        from xmac_cli.eval_ppl.evaluation import PerplexityOptions

        return PerplexityOptions(
            window=self.window,
            stride=self.stride,
            bos=self.bos,
            chat_template=self.chat_template,
            max_documents=self.max_documents,
            batch_size=self.batch_size,
            bootstrap=self.bootstrap,
            seed=seed,
        )

    def _report(self, domains: Sequence[DomainScore], options: PerplexityOptions, window: int, stride: int) -> Report:
        from xmac_cli.eval_ppl.evaluation import summarize

        summaries: list[dict[str, Any]] = []
        for domain in domains:
            entry = {"name": domain.name, "sha256": domain.sha256, **summarize([domain], options)}
            if self.per_document:
                entry["per_document"] = [vars(document) for document in domain.documents]
            summaries.append(entry)
        total = {"name": "total", **summarize(domains, options)}
        rows = [_row(entry) for entry in ([*summaries, total] if len(summaries) > 1 else summaries)]
        columns = ["domain", "documents", "tokens", "perplexity", "95 % interval", "bits per byte"]
        table = Table("perplexity", columns, rows, f"window {window} tokens, stride {stride}")
        result = {"window": window, "stride": stride, "domains": summaries, "total": total}
        return Report(result=result, tables=[table])


def _row(entry: dict[str, Any]) -> list[object]:
    interval = entry["perplexity_interval"]
    shown = None if interval is None else f"{interval[0]:.4g} - {interval[1]:.4g}"
    return [entry["name"], entry["documents"], entry["tokens"], entry["perplexity"], shown, entry["bits_per_byte"]]
