"""`--verify`: three ways to check a pruned checkpoint against its source, each stronger and dearer than the last.

files  = bytes: every tensor is a tensor of the source or a declared slice (any dtype, no model is built)
block  = files, and every MoE layer computes what the masked layer of the source computes
logits = files, and the whole model does
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xmac_cli.cli.progress import Progress
from xmac_cli.prune_moe.layout import Layout
from xmac_cli.prune_moe.plan_file import Plan
from xmac_cli.prune_moe.verify_files import verify_files
from xmac_cli.prune_moe.verify_models import Difference, verify_blocks, verify_logits

VerifyLevel = Literal["none", "files", "block", "logits"]


@dataclass(frozen=True)
class Verification:
    """What was checked, and how well it agreed.

    Args:
        level: what was asked for.
        tensors: tensors compared byte by byte.
        differences: of blocks or logits.
    """

    level: VerifyLevel
    tensors: int = 0
    differences: tuple[Difference, ...] = ()

    @property
    def largest_difference(self) -> float | None:
        """Largest absolute difference between the masked source and the result, or None when no model was run."""
        return max((difference.largest for difference in self.differences), default=None)

    def as_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {"level": self.level, "tensors": self.tensors, "largest_difference": self.largest_difference}


def verify_pruned(
    layout: Layout,
    plan: Plan,
    result: Path,
    level: VerifyLevel = "files",
    *,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Verification:
    """Check a pruned checkpoint.

    Args:
        layout: of the source.
        plan: that was applied, from `ready_plan`.
        result: the pruned directory (it may still be staged).
        level: see the module docstring.
        seed: of random hidden states and tokens.
        device: where whole models run.

    Raises:
        VerificationError: something is wrong; the message says what.
    """
    if level == "none":
        return Verification("none")
    tensors = verify_files(layout, plan, result, progress=progress)
    if level == "block":
        return Verification(level, tensors, tuple(verify_blocks(layout, plan, result, seed=seed, progress=progress)))
    if level == "logits":
        return Verification(level, tensors, (verify_logits(layout, plan, result, seed=seed, device=device),))
    return Verification(level, tensors)
