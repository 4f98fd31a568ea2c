"""Resumable training states as safetensors and JSON: parameters, AdamW moments, average, random generators.

A state is a folder `state-<step>`, written beside its final name and renamed, so that a killed run leaves either a
complete state or none. Nothing is pickled, so a state from somebody else is safe to open.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from xmac_cli.cli.errors import InputError, ResumeMismatchError

SCHEMA = "xmac/training-state/1"
_PREFIX = "state-"


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; tied tensors appear once, under their first name."""
    persistent = model.state_dict(keep_vars=True)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
    return tensors


def save_state(
    directory: Path,
    step: int,
    job_key: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, torch.Tensor] | None,
    extra: Mapping[str, Any],
) -> Path:
    """Write `state-<step>` into `directory` and drop older states.

    Args:
        directory: folder of the run; created when absent.
        step: optimizer steps done.
        job_key: identifies options and data; a resume with another key is refused.
        model: unwrapped model.
        optimizer: torch optimizer over some of the model's parameters.
        average: exponential moving average by parameter name, or None.
        extra: further JSON-able values, returned by `load_state`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"{_PREFIX}{step:08d}"
    partial = directory / f".{final.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    _save(named_tensors(model), partial / "model.safetensors")
    moments, scalars = _optimizer_tensors(model, optimizer)
    _save(moments, partial / "optimizer.safetensors")
    if average is not None:
        _save(average, partial / "average.safetensors")
    generators, python_state = _generator_states()
    _save(generators, partial / "generators.safetensors")
    document = {
        "schema": SCHEMA,
        "step": step,
        "job_key": job_key,
        "optimizer": scalars,
        "generators": python_state,
        "average": average is not None,
        "extra": dict(extra),
    }
    (partial / "state.json").write_text(json.dumps(document), encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    for older in _states(directory):
        if older != final:
            shutil.rmtree(older)
    return final


def latest_state(directory: Path) -> Path | None:
    """The state of the highest step in `directory`, or None."""
    states = _states(directory)
    return states[-1] if states else None


def load_state(
    path: Path,
    job_key: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: dict[str, torch.Tensor] | None,
) -> tuple[int, dict[str, Any]]:
    """Bring model, optimizer, average and random generators back to a saved state, in place.

    Returns:
        optimizer steps done, and the `extra` given to `save_state`.

    Raises:
        InputError: the folder is no complete state of this model.
        ResumeMismatchError: it belongs to a run with other options or data.
    """
    try:
        document = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the training state {path}: {error}") from error
    if document.get("schema") != SCHEMA:
        raise InputError(f"{path} is not a training state that this version of xmac reads")
    if document["job_key"] != job_key:
        raise ResumeMismatchError(
            f"the training state {path} belongs to a run with other options or data",
            "repeat the earlier options, or start anew without --resume",
        )
    if document["average"] != (average is not None):
        raise ResumeMismatchError(f"the training state {path} and this run disagree about the moving average")
    _load(path / "model.safetensors", named_tensors(model))
    _restore_optimizer(path / "optimizer.safetensors", document["optimizer"], model, optimizer)
    if average is not None:
        _load(path / "average.safetensors", average)
    _restore_generators(path / "generators.safetensors", document["generators"])
    return int(document["step"]), dict(document["extra"])


def _states(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_dir() and path.name.startswith(_PREFIX))


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _load(path: Path, targets: Mapping[str, torch.Tensor]) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        if set(file.keys()) != set(targets):
            raise InputError(f"{path} holds other tensors than this model")
        for name, target in targets.items():
            source = file.get_tensor(name)
            if source.shape != target.shape:
                raise InputError(f"{path}: tensor {name} has shape {tuple(source.shape)}, not {tuple(target.shape)}")
            target.copy_(source)


def _optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Moments by `<parameter>/<moment>`; zero-dimensional states (step counts) as numbers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors, scalars = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                label = f"{names[id(parameter)]}/{key}"
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    tensors[label] = value
                else:
                    scalars[label] = float(value)
    return tensors, scalars


def _restore_optimizer(
    path: Path, scalars: Mapping[str, float], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with safe_open(path, framework="pt") as file:
        labels = set(file.keys())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                prefix = names[id(parameter)] + "/"
                state: dict[str, Any] = {}
                for label in sorted(labels):
                    if label.startswith(prefix):
                        state[label.removeprefix(prefix)] = file.get_tensor(label).to(parameter.device)
                for label, value in scalars.items():
                    if label.startswith(prefix):
                        # AdamW counts steps in a float32 tensor, on the parameter's device when fused.
                        device = parameter.device if group.get("fused") else "cpu"
                        state[label.removeprefix(prefix)] = torch.tensor(value, dtype=torch.float32, device=device)
                optimizer.state[parameter] = state


def _generator_states() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors.update({f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numbers = {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
    }
    return tensors, numbers


def _restore_generators(path: Path, numbers: Mapping[str, Any]) -> None:
    with safe_open(path, framework="pt") as file:
        torch.set_rng_state(file.get_tensor("torch"))
        cuda = [name for name in file.keys() if name.startswith("cuda.")]  # noqa: SIM118 - safe_open is no mapping
        if torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([file.get_tensor(f"cuda.{i}") for i in range(len(cuda))])
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
