"""The training loop: knows optimizers, precision, accumulation and resuming; knows nothing of any method.

A method supplies a function that turns a model and a batch into a loss, and a function that returns batch number i.
Because batches are addressed by number, a resumed run sees exactly the batches that an uninterrupted run would see.
With several processes (`accelerate launch`) process r of w takes batches r, r + w, r + 2w, ...; gradients are their
mean. Only process 0 writes; its random generators are the ones a resumed run starts from.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmac_cli.cli.errors import UsageError, XmacError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.training.options import TrainingOptions, learning_rate
from xmac_cli.training.state import latest_state, load_state, save_state

Batch = Any
BatchSource = Callable[[int], Batch]


@dataclass(frozen=True)
class StepLoss:
    """A scalar loss to differentiate and numbers to report."""

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict)


LossFunction = Callable[[torch.nn.Module, Batch], "StepLoss | torch.Tensor"]


@dataclass(frozen=True)
class TrainingResult:
    """What is left after the last step.

    Args:
        steps: optimizer steps done.
        resumed_from: step that this call started at.
        history: metrics lines of this run, with those before a resume when a directory was given.
        average: exponential moving average of the parameters by name, or None.
    """

    steps: int
    resumed_from: int
    history: tuple[dict[str, float], ...]
    average: dict[str, torch.Tensor] | None


def train(
    model: torch.nn.Module,
    batches: BatchSource,
    loss_fn: LossFunction,
    options: TrainingOptions,
    progress: Progress | None = None,
    directory: Path | None = None,
    *,
    job_key: str = "",
    resume: bool = True,
    stop_after: int | None = None,
) -> TrainingResult:
    """Train a model in place.

    Args:
        model: any module; only parameters that require gradients are trained.
        batches: batch number -> batch; tensors in (nested) dicts, lists and tuples are moved to the device.
        loss_fn: (model, batch) -> `StepLoss`, or a scalar tensor: the mean loss of the batch.
        options: see `TrainingOptions`.
        progress: where bars and metrics go.
        directory: folder for `metrics.jsonl` and resumable states; None keeps nothing.
        job_key: identifies the data and the method; a state with another key is not resumed.
        resume: continue from the latest state in `directory`, when there is one.
        stop_after: leave after this many optimizer steps have been done in all; a state is saved.

    Raises:
        XmacError: the loss became infinite or not a number.
        ResumeMismatchError: the saved state belongs to other options or data.
    """
    progress = progress or NullProgress()
    if options.save_every is not None and directory is None:
        raise UsageError("training option save_every needs a directory to save into")
    accelerator = _accelerator(options)
    device = _device(accelerator, options)
    model.to(device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, options.weight_decay),
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        fused=device.type in ("cpu", "cuda"),
    )
    average = _average_of(model) if options.ema_decay is not None else None
    key = f"{options.job_key}:{job_key}"
    start = 0
    seed_everything(options.seed + accelerator.process_index)
    saved = latest_state(directory) if directory is not None and resume else None
    if saved is not None:
        start, _ = load_state(saved, key, model, optimizer, average)
        progress.note(f"training continues at step {start}")
    writes = directory is not None and accelerator.is_main_process
    metrics = _MetricsFile(directory / "metrics.jsonl" if directory is not None and writes else None, start)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    last = options.steps if stop_after is None else min(options.steps, stop_after)
    wrapped.train()
    with progress.task("training", total=options.steps, unit="steps") as task:
        task.advance(start)
        for step in range(start, last):
            lr = learning_rate(options, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            numbers = _optimizer_step(accelerator, device, wrapped, prepared, batches, loss_fn, options, step)
            if average is not None and options.ema_decay is not None:
                _update_average(average, model, options.ema_decay)
            done = step + 1
            if done % options.log_every == 0 or done == last:
                line = {"step": done, "lr": lr, **numbers}
                metrics.add(line)
                progress.metric(line)
            if directory is not None and writes and _is_save_step(options, done, last, stop_after):
                save_state(directory, done, key, model, optimizer, average, {})
            task.advance(1)
    # accelerate replaces `forward` for mixed precision; the caller gets the model back as it was.
    accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    return TrainingResult(max(last, start), start, tuple(metrics.lines), average)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW groups: decay for matrices, none for vectors (norms, biases); frozen parameters are left out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient")
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def averaged(model: torch.nn.Module, average: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the model computes with its moving average; afterwards the trained parameters are back."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in average}
    trained = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(average[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(trained[name])


def _optimizer_step(
    accelerator: Any,
    device: torch.device,
    model: torch.nn.Module,
    optimizer: Any,
    batches: BatchSource,
    loss_fn: LossFunction,
    options: TrainingOptions,
    step: int,
) -> dict[str, float]:
    """Accumulate gradients over the step's batches and update; returns mean loss, metrics and the gradient norm."""
    sums: dict[str, float] = {}
    norm = None
    for part in range(options.gradient_accumulation):
        number = (step * options.gradient_accumulation + part) * accelerator.num_processes + accelerator.process_index
        batch = _to_device(batches(number), device)
        with accelerator.accumulate(model):
            with accelerator.autocast():
                result = loss_fn(model, batch)
            outcome = result if isinstance(result, StepLoss) else StepLoss(result)
            loss = float(outcome.loss.detach())
            if not np.isfinite(loss):
                raise XmacError(
                    f"the training loss became {loss} at step {step + 1}", "lower the learning rate or clip more"
                )
            accelerator.backward(outcome.loss)
            if accelerator.sync_gradients and options.max_grad_norm is not None:
                norm = accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        for name, value in {"loss": loss, **outcome.metrics}.items():
            sums[name] = sums.get(name, 0.0) + float(value) / options.gradient_accumulation
    if norm is not None:
        sums["grad_norm"] = float(norm)
    return sums


def _is_save_step(options: TrainingOptions, done: int, last: int, stop_after: int | None) -> bool:
    if done == last and stop_after is not None:
        return True
    return options.save_every is not None and (done % options.save_every == 0 or done == last)


def _accelerator(options: TrainingOptions) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType

    if "LOCAL_RANK" not in os.environ:
        # accelerate keeps device and precision of the first Accelerator for the whole process; two runs with different
        # settings in one process need a fresh start. A launched multi-process run keeps its process group.
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        mixed_precision=options.amp,
        gradient_accumulation_steps=options.gradient_accumulation,
        cpu=options.device == "cpu",
        device_placement=False,
    )
    plain = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if options.save_every is not None and accelerator.distributed_type not in plain:
        raise UsageError(f"resumable states are not available under {accelerator.distributed_type.value}")
    return accelerator


def _device(accelerator: Any, options: TrainingOptions) -> torch.device:
    if accelerator.num_processes > 1 or options.device == "auto":
        return accelerator.device
    return torch.device(options.device)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch


def _average_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().float().clone() for name, p in model.named_parameters() if p.requires_grad}


def _update_average(average: dict[str, torch.Tensor], model: torch.nn.Module, decay: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in average:
                average[name].lerp_(parameter.float(), 1 - decay)


class _MetricsFile:
    """Metrics lines in memory and, with a path, as JSONL; lines beyond the resumed step are dropped."""

    def __init__(self, path: Path | None, start: int) -> None:
        self.path = path
        self.lines: list[dict[str, float]] = []
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and start > 0:
            lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
            self.lines = [line for line in lines if line["step"] <= start]
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")

    def add(self, line: dict[str, float]) -> None:
        self.lines.append(line)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
