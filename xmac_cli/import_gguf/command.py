"""`xmac import-gguf`: options and report; the conversion is in `xmac_cli.models.gguf`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.report.schema import Report, Table


@dataclass(frozen=True)
class ImportGguf(Verb):
    """A GGUF file as a safetensors directory that transformers, vLLM and the other verbs load.

    Weights are de-quantised (--dtype, bfloat16 by default), so the result is as good as the GGUF file and no better.
    Tokenizer, chat template and generation settings come along.
    """

    name: ClassVar[str] = "import-gguf"
    reads: ClassVar[str | None] = "file"
    writes: ClassVar[str | None] = "directory"

    def execute(self, job: Job) -> Report:
        from xmac_cli.checkpoint.hashing import hash_file
        from xmac_cli.models.gguf import import_gguf

        source = job.checkpoint
        imported = import_gguf(source, job.staged.path, dtype=job.dtype, progress=job.progress)
        result = {"file": source.name, "sha256": hash_file(source), **asdict(imported)}
        rows = [[key.replace("_", " "), value] for key, value in result.items()]
        note = "logits are compared, on a probe text, with what transformers computes from the GGUF file in float32"
        return Report(result=result, tables=[Table("imported", ["", ""], rows, note)])

    def plan(self, source: Path | None) -> Report:
        from xmac_cli.models.gguf import read_gguf_header

        if source is None:
            raise UsageError("INPUT is missing", "name a .gguf file")
        header = read_gguf_header(source)
        result = {"file": source.name, "bytes": source.stat().st_size, **asdict(header)}
        rows = [[key.replace("_", " "), value] for key, value in result.items()]
        return Report(result=result, tables=[Table("would import", ["", ""], rows)])
