"""The smallest verb that writes a checkpoint: it copies its input. Used to test the contract itself."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.writer import ByteRange, PlannedTensor, ShardPlan
from xmac_cli.cli.errors import ConstraintError
from xmac_cli.cli.options import Option
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.report.schema import Figure, Report, Table


@dataclass(frozen=True)
class CopyCheckpoint(Verb):
    """Copy a checkpoint tensor by tensor."""

    name: ClassVar[str] = "copy"
    reads: ClassVar[str | None] = "checkpoint"
    writes: ClassVar[str | None] = "checkpoint"
    times: Annotated[int, Option("how often", ge=1)] = 1
    fail: Annotated[bool, Option("fail after writing")] = False
    pause: Annotated[float, Option("seconds to wait after each shard", ge=0)] = 0.0

    def execute(self, job: Job) -> Report:
        from xmac_cli.checkpoint.output import write_checkpoint

        checkpoint = Checkpoint.open(job.checkpoint)
        plans = [
            ShardPlan(
                shard.path.name,
                tuple(
                    PlannedTensor(t.name, t.dtype, t.shape, (ByteRange(t.file, t.start, t.end - t.start),))
                    for t in shard.tensors.values()
                ),
                shard.metadata,
            )
            for shard in checkpoint.shards
        ]
        job.progress.metric({"step": 1})
        write_checkpoint(job.staged, plans, config=checkpoint.config, source=checkpoint, progress=job.progress)
        if self.fail:
            raise ConstraintError("asked to fail")
        time.sleep(self.pause)
        table = Table("Copied", ["tensor", "bytes"], [[name, t.nbytes] for name, t in checkpoint.tensors.items()])
        figure = Figure("bytes", "Bytes", lambda f: f.subplots().plot([1, 2]))
        return Report({"tensors": len(checkpoint.tensors)}, tables=(table,), figures=(figure,))

    def plan(self, source: Path | None) -> Report:
        assert source is not None
        return Report({"bytes": Checkpoint.open(source).total_bytes})
