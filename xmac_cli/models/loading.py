"""Loading a causal language model and its tokenizer through transformers, strictly.

A checkpoint whose tensors do not match its architecture is an error here, not a model with random parts. Weights come
from safetensors only, and code that a checkpoint ships runs only when the caller says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from xmac_cli.cli.errors import InputError, UnsupportedModelError, UsageError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.*",
    "tekken.json",
    "*.bpe.model",
    "spiece.model",
)


def resolve_device(device: str) -> torch.device:
    """Turn "auto", "cpu", "cuda" or "cuda:N" into a device that exists.

    Raises:
        UsageError: there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"'{device}' is no device", "use auto, cpu, cuda or cuda:N") from error
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {device} does not exist here ({torch.cuda.device_count()} CUDA devices)")
    return resolved


def resolve_dtype(dtype: str) -> torch.dtype | str:
    """Turn "auto" or a torch dtype's name into what transformers expects."""
    if dtype == "auto":
        return "auto"
    if dtype not in DTYPES:
        raise UsageError(f"dtype '{dtype}' is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_model(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    experts: str = "auto",
) -> Any:
    """Load a causal language model for evaluation.

    Args:
        path: checkpoint directory.
        device: "auto", "cpu", "cuda" or "cuda:N"; "auto" spreads a model over several GPUs when there are several.
        dtype: "auto" (the checkpoint's own) or a torch dtype's name.
        trust_remote_code: run Python code that the checkpoint ships.
        experts: how transformers computes routed experts: "auto", "eager" or "grouped_mm".

    Returns:
        a transformers model in eval mode.

    Raises:
        InputError: files are missing or broken, or tensors are missing, unexpected or of another shape.
        UnsupportedModelError: this transformers version has no such architecture.
    """
    from transformers import AutoModelForCausalLM

    directory = _directory(path)
    place = resolve_device(device)
    several = device == "auto" and torch.cuda.device_count() > 1
    options: dict[str, Any] = {
        "dtype": resolve_dtype(dtype),
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    if place.type != "cpu":
        # Straight to the device, or spread over several, without a full copy in main memory.
        options["device_map"] = "auto" if several else {"": place}
    model, info = _from_pretrained(AutoModelForCausalLM, directory, options)
    _check_loading_info(directory, info)
    choose_experts(model, experts)
    return model.eval()


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a checkpoint directory.

    Raises:
        InputError: there is none, or it is broken.
    """
    from transformers import AutoTokenizer

    directory = _directory(path)
    if not any(next(directory.glob(pattern), None) for pattern in _VOCABULARY_FILES):
        # transformers would answer with an empty tokenizer of the family.
        raise InputError(f"{directory} holds no tokenizer", "copy the tokenizer files of the original model into it")
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    return _from_pretrained(AutoTokenizer, directory, options)


def choose_experts(model: Any, experts: str = "auto") -> None:
    """Pick how routed experts are computed.

    On a CPU `batched_mm` gathers a copy of the weights for every token and is about a hundred times slower than the
    other two, so it is never chosen; `grouped_mm` has no float64 path there, so float64 runs `eager`.
    """
    if experts not in ("auto", "eager", "grouped_mm"):
        raise UsageError(f"experts implementation '{experts}' is not one of auto, eager, grouped_mm")
    if not model._can_set_experts_implementation():
        return
    if experts != "auto":
        model.set_experts_implementation(experts)
        return
    try:
        model.set_experts_implementation("eager" if model.dtype == torch.float64 else "grouped_mm")
    except (ImportError, ValueError):
        # This architecture, or this build of torch, cannot dispatch grouped_mm.
        model.set_experts_implementation("eager")


def quiet_transformers() -> None:
    """Switch off transformers' own progress bars and advice; xmac reports through `Progress` and errors."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _directory(path: str | Path) -> Path:
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} is no checkpoint directory (it has no config.json)")
    return directory


def _from_pretrained(factory: Any, directory: Path, options: dict[str, Any]) -> Any:
    from safetensors import SafetensorError

    quiet_transformers()
    try:
        return factory.from_pretrained(str(directory), **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "trust_remote_code" in str(error):
            hint = "read that code, then allow it with --trust-remote-code"
            raise UsageError(f"{directory} needs Python code that it ships", hint) from error
        if "does not recognize this architecture" in str(error):
            raise UnsupportedModelError(
                f"transformers does not know the architecture of {directory}: {reason}"
            ) from error
        raise InputError(f"transformers cannot load {directory}: {reason}") from error


def _check_loading_info(directory: Path, info: dict[str, Any]) -> None:
    for kind, meaning in (
        ("missing_keys", "lacks tensors that its architecture has"),
        ("unexpected_keys", "holds tensors that its architecture does not have"),
        ("mismatched_keys", "holds tensors of another shape than its config says"),
    ):
        names = sorted(str(name) for name in info.get(kind, ()))
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(
                f"{directory} {meaning}: {', '.join(names[:3])}{more}",
                "config.json and the weights do not belong together",
            )
