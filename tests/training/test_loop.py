"""The training loop: it computes what plain torch computes, and resuming changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from xmac_cli.cli.errors import InputError, ResumeMismatchError, UsageError, XmacError
from xmac_cli.training.loop import StepLoss, averaged, parameter_groups, train
from xmac_cli.training.options import TrainingOptions, learning_rate
from xmac_cli.training.state import latest_state


class Net(torch.nn.Module):
    """Two tied linear maps and a norm, with dropout so that the random generator matters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.second = torch.nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.tanh(self.norm(self.first(x)))))


def new_net(dropout: float = 0.0) -> Net:
    torch.manual_seed(3)
    return Net(dropout)


def batch(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(5, 6, generator=generator)
    return {"x": x, "y": x.flip(1)}


def squared_error(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(data["x"]) - data["y"]).square().mean()


def options(**changes: object) -> TrainingOptions:
    base: dict[str, object] = {"steps": 12, "lr": 0.01, "device": "cpu", "weight_decay": 0.1, "seed": 7}
    return TrainingOptions(**{**base, **changes})  # type: ignore[arg-type]


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plain_torch(model: Net, settings: TrainingOptions) -> None:
    """The reference: textbook AdamW with clipping, accumulating by averaging losses."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=settings.betas, eps=settings.eps, foreach=False, fused=False)
    count = settings.gradient_accumulation
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        loss = sum(squared_error(model, batch(step * count + part)) for part in range(count)) / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_training_equals_plain_torch(accumulation: int, schedule: str) -> None:
    settings = options(gradient_accumulation=accumulation, schedule=schedule, warmup_steps=3, max_grad_norm=0.5)
    ours, reference = new_net(), new_net()
    train(ours, batch, squared_error, settings)
    plain_torch(reference, settings)
    assert not torch.allclose(parameters(ours), parameters(new_net()), atol=1e-2)
    torch.testing.assert_close(parameters(ours), parameters(reference), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("stop", [1, 4, 11])
def test_interrupting_and_resuming_gives_the_same_bytes(tmp_path: Path, stop: int) -> None:
    settings = options(ema_decay=0.8, gradient_accumulation=2, log_every=1)
    whole = new_net(dropout=0.3)
    straight = train(whole, batch, squared_error, settings, directory=tmp_path / "straight")
    parts = new_net(dropout=0.3)
    train(parts, batch, squared_error, settings, directory=tmp_path / "parts", stop_after=stop)
    torch.manual_seed(999)
    fresh = new_net(dropout=0.3)
    second = train(fresh, batch, squared_error, settings, directory=tmp_path / "parts")
    assert second.resumed_from == stop
    assert torch.equal(parameters(fresh), parameters(whole))
    assert straight.average is not None and second.average is not None
    assert all(torch.equal(straight.average[name], second.average[name]) for name in straight.average)
    assert second.history == straight.history
    written = (tmp_path / "parts" / "metrics.jsonl").read_text()
    assert written == (tmp_path / "straight" / "metrics.jsonl").read_text()


def test_metrics_beyond_the_saved_step_are_dropped_on_resume(tmp_path: Path) -> None:
    settings = options(log_every=1)
    train(new_net(), batch, squared_error, settings, directory=tmp_path, stop_after=4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 0.0}) + "\n")
    train(new_net(), batch, squared_error, settings, directory=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[4]["loss"] > 0


def test_states_hold_no_pickles_and_only_the_latest_stays(tmp_path: Path) -> None:
    train(new_net(), batch, squared_error, options(save_every=5), directory=tmp_path)
    states = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert states == ["state-00000012"]
    suffixes = {path.suffix for path in (tmp_path / states[0]).iterdir()}
    assert suffixes == {".safetensors", ".json"}
    with safe_open(tmp_path / states[0] / "optimizer.safetensors", framework="pt") as file:
        assert "first.weight/exp_avg_sq" in set(file.keys())


@pytest.mark.parametrize(
    ("changes", "key"), [({"lr": 0.02}, "data"), ({"seed": 8}, "data"), ({"steps": 13}, "data"), ({}, "other data")]
)
def test_a_state_of_other_options_or_data_is_not_resumed(tmp_path: Path, changes: dict[str, float], key: str) -> None:
    train(new_net(), batch, squared_error, options(), directory=tmp_path, stop_after=2, job_key="data")
    with pytest.raises(ResumeMismatchError):
        train(new_net(), batch, squared_error, options(**changes), directory=tmp_path, job_key=key)


def test_options_that_do_not_change_the_result_may_differ_on_resume(tmp_path: Path) -> None:
    train(new_net(), batch, squared_error, options(), directory=tmp_path, stop_after=2)
    result = train(new_net(), batch, squared_error, options(log_every=3, save_every=4), directory=tmp_path)
    assert result.resumed_from == 2


def test_resume_false_starts_anew(tmp_path: Path) -> None:
    train(new_net(), batch, squared_error, options(), directory=tmp_path, stop_after=2)
    assert train(new_net(), batch, squared_error, options(), directory=tmp_path, resume=False).resumed_from == 0


def test_a_damaged_state_is_an_input_error(tmp_path: Path) -> None:
    train(new_net(), batch, squared_error, options(), directory=tmp_path, stop_after=2)
    state = latest_state(tmp_path)
    assert state is not None
    (state / "state.json").write_text("{")
    with pytest.raises(InputError, match="cannot read the training state"):
        train(new_net(), batch, squared_error, options(), directory=tmp_path)


def test_a_state_of_another_model_is_an_input_error(tmp_path: Path) -> None:
    train(new_net(), batch, squared_error, options(), directory=tmp_path, stop_after=2)
    other = torch.nn.Sequential(torch.nn.Linear(6, 6))
    with pytest.raises(InputError, match="other tensors"):
        train(other, batch, squared_error, options(), directory=tmp_path)


def test_an_unfinished_state_is_ignored(tmp_path: Path) -> None:
    train(new_net(), batch, squared_error, options(), directory=tmp_path, stop_after=2)
    (tmp_path / ".state-00000009.partial").mkdir()
    assert train(new_net(), batch, squared_error, options(), directory=tmp_path).resumed_from == 2


def test_the_average_is_the_textbook_recursion() -> None:
    model = new_net()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trail: list[dict[str, torch.Tensor]] = []

    def recording(net: torch.nn.Module, data: dict[str, torch.Tensor]) -> StepLoss:
        trail.append({name: parameter.detach().clone() for name, parameter in net.named_parameters()})
        return StepLoss(squared_error(net, data))

    result = train(model, batch, recording, options(ema_decay=0.9, steps=5))
    trail.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    for snapshot in trail[1:]:
        expected = {name: 0.9 * value + 0.1 * snapshot[name] for name, value in expected.items()}
    assert result.average is not None
    for name, value in expected.items():
        torch.testing.assert_close(result.average[name], value, atol=1e-6, rtol=1e-5)


def test_averaged_swaps_and_puts_back() -> None:
    model = new_net()
    before = parameters(model)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    with averaged(model, zeros):
        assert parameters(model).abs().sum() == 0
    assert torch.equal(parameters(model), before)


def test_bf16_autocast_computes_in_bf16_and_leaves_the_model_as_it_was() -> None:
    seen: list[torch.dtype] = []
    model = new_net()
    model.first.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    train(model, batch, squared_error, options(amp="bf16", steps=2))
    assert seen == [torch.bfloat16] * 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model(batch(0)["x"])
    assert seen[-1] == torch.float32
    train(model, batch, squared_error, options(steps=1))
    assert seen[-1] == torch.float32


def test_frozen_parameters_stay_and_get_no_optimizer_state() -> None:
    model = new_net()
    model.norm.requires_grad_(False)
    before = model.norm.weight.clone()
    train(model, batch, squared_error, options())
    assert torch.equal(model.norm.weight, before)
    grouped = {id(p) for group in parameter_groups(model, 0.1) for p in group["params"]}
    assert id(model.norm.weight) not in grouped


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="requires a gradient"):
        train(new_net().requires_grad_(False), batch, squared_error, options())


def test_a_loss_that_is_no_number_stops_training_with_its_step() -> None:
    def loss(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return squared_error(model, data) * float("nan")

    with pytest.raises(XmacError, match="nan at step 1"):
        train(new_net(), batch, loss, options())


def test_reported_numbers_are_means_over_accumulated_batches() -> None:
    def loss(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> StepLoss:
        return StepLoss(squared_error(model, data), {"first": data["x"][0, 0]})

    model = new_net()
    with torch.no_grad():
        expected = sum(float(squared_error(model, batch(index))) for index in range(3)) / 3
    result = train(model, batch, loss, options(steps=1, gradient_accumulation=3))
    (line,) = result.history
    assert line["loss"] == pytest.approx(expected, rel=1e-6)
    assert line["first"] == pytest.approx(sum(float(batch(index)["x"][0, 0]) for index in range(3)) / 3, rel=1e-6)
    assert line["step"] == 1


def test_learning_rate_schedules_hit_their_corner_points() -> None:
    settings = options(steps=100, lr=2.0, warmup_steps=10, final_lr_share=0.1, schedule="linear")
    assert learning_rate(settings, 0) == pytest.approx(0.2)
    assert learning_rate(settings, 9) == pytest.approx(2.0)
    assert learning_rate(settings, 10) == pytest.approx(2.0)
    assert learning_rate(settings, 55) == pytest.approx(0.2 + 1.8 * 0.5)
    cosine = options(steps=100, lr=2.0, schedule="cosine")
    assert learning_rate(cosine, 25) == pytest.approx(1 + math.cos(math.pi / 4))
    stable = options(steps=100, lr=2.0, warmup_steps=10, schedule="wsd", decay_share=0.2)
    assert {learning_rate(stable, step) for step in range(10, 81)} == {2.0}
    assert learning_rate(stable, 90) == pytest.approx(1.0)
    assert learning_rate(options(schedule="constant", lr=2.0), 11) == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"ema_decay": 1.0},
        {"warmup_steps": 13},
        {"gradient_accumulation": 0},
        {"save_every": 0},
    ],
)
def test_options_that_make_no_sense_are_usage_errors(changes: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        options(**changes)


def test_saving_without_a_directory_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="directory"):
        train(new_net(), batch, squared_error, options(save_every=2))
