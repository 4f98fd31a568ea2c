"""What a training run is told, and the learning rate as a pure function of the step.

Schedules: `constant`; `linear` and `cosine` fall from the end of the warm-up to the last step; `wsd` (warm-up, stable,
decay; Hu et al., MiniCPM, arXiv 2404.06395, section 4) stays constant and falls along a cosine in the last
`decay_share` of the steps.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

from xmac_cli.cli.errors import UsageError

Schedule = Literal["constant", "linear", "cosine", "wsd"]
Precision = Literal["no", "bf16", "fp16"]

# Options that change how a run reports or saves itself, and never what it computes.
_NOT_PART_OF_THE_JOB = ("save_every", "log_every")


@dataclass(frozen=True)
class TrainingOptions:
    """Settings of `xmac_cli.training.loop.train`.

    Args:
        steps: optimizer steps.
        lr: peak learning rate of AdamW.
        schedule: see the module's head.
        warmup_steps: steps of linear growth to the peak.
        decay_share: share of the steps that `wsd` decays over.
        final_lr_share: learning rate at the end, as a share of the peak.
        weight_decay: for parameters with two dimensions or more; norms and biases have none.
        betas: AdamW's averaging constants.
        eps: AdamW's denominator constant.
        max_grad_norm: gradients are clipped to this norm; None leaves them.
        gradient_accumulation: batches per optimizer step; the gradient is their mean.
        amp: autocast dtype; parameters stay in their own.
        ema_decay: keep an exponential moving average of the parameters.
        save_every: steps between resumable states; None saves none.
        log_every: steps between metrics lines.
        seed: of every random generator at the first step.
        device: as torch names it, or "auto".
    """

    steps: int
    lr: float
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    decay_share: float = 0.5
    final_lr_share: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    gradient_accumulation: int = 1
    amp: Precision = "no"
    ema_decay: float | None = None
    save_every: int | None = None
    log_every: int = 10
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        positive = {
            "steps": self.steps,
            "lr": self.lr,
            "gradient_accumulation": self.gradient_accumulation,
            "log_every": self.log_every,
            "save_every": 1 if self.save_every is None else self.save_every,
        }
        for name, value in positive.items():
            if not value > 0:
                raise UsageError(f"training option {name} must be positive, got {value}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise UsageError(f"training option ema_decay must lie between 0 and 1, got {self.ema_decay}")
        if self.warmup_steps > self.steps:
            raise UsageError(f"warm-up ({self.warmup_steps} steps) is longer than training ({self.steps} steps)")

    @property
    def job_key(self) -> str:
        """sha256 over every option that changes the result."""
        options = {name: value for name, value in asdict(self).items() if name not in _NOT_PART_OF_THE_JOB}
        return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def learning_rate(options: TrainingOptions, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    The last warm-up step already runs at the peak; the last step of a falling schedule runs just above the final rate.
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    start = options.warmup_steps
    if options.schedule == "wsd":
        start = max(start, round(options.steps * (1 - options.decay_share)))
    if options.schedule == "constant" or step < start:
        return options.lr
    done = (step - start) / max(1, options.steps - start)
    share = 1 - done if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return options.lr * (options.final_lr_share + (1 - options.final_lr_share) * share)
