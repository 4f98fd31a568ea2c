"""A GGUF file becomes a normal safetensors directory with de-quantised weights.

transformers reads GGUF, but the model it returns stays marked as quantised and cannot be saved or cast. So a fresh
model of the same class is built from the same config and takes over the de-quantised state. The result computes what
the quantised file computes: its quality is that of the quantised model, not of the original.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmac_cli.cli.errors import InputError, MissingExtraError, UnsupportedModelError
from xmac_cli.cli.progress import NullProgress, Progress

_MAGIC = b"GGUF"
# What reading a damaged or unknown file makes transformers raise.
_LOADER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


@dataclass(frozen=True)
class GgufHeader:
    """First 24 bytes of a GGUF file."""

    version: int
    tensors: int
    metadata_entries: int


@dataclass(frozen=True)
class ImportedModel:
    """What was written.

    Args:
        architecture: class name in config.json.
        parameters: number of weights, tied ones once.
        dtype: dtype of the weights.
        max_logit_difference: between the written model and what transformers read from the GGUF file, on a probe text.
        same_argmax: whether both predict the same next token everywhere on that text.
    """

    architecture: str
    parameters: int
    dtype: str
    max_logit_difference: float
    same_argmax: bool


def read_gguf_header(path: Path) -> GgufHeader:
    """Check that a file is GGUF (versions 2 and 3, little-endian) without reading its weights.

    Raises:
        InputError: it is not.
    """
    if not path.is_file():
        raise InputError(f"{path} is not a file")
    with path.open("rb") as file:
        head = file.read(24)
    if len(head) < 24 or head[:4] != _MAGIC:
        raise InputError(f"{path} is not a GGUF file (it does not begin with 'GGUF')")
    version, tensors, entries = struct.unpack("<IQQ", head[4:])
    if version not in (2, 3):
        raise InputError(f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read")
    if not 0 < tensors < 10**6 or not 0 < entries < 10**6:
        raise InputError(f"{path} claims {tensors} tensors and {entries} metadata entries")
    return GgufHeader(version, tensors, entries)


def import_gguf(
    path: Path, directory: Path, *, dtype: str = "bfloat16", progress: Progress | None = None
) -> ImportedModel:
    """Convert a GGUF file into a checkpoint directory with tokenizer.

    Args:
        path: the GGUF file.
        directory: where config, weights and tokenizer are written; may exist.
        dtype: of the written weights; "auto" is bfloat16.
        progress: notes.

    Raises:
        InputError: the file is broken.
        UnsupportedModelError: transformers cannot read this architecture from GGUF.
        MissingExtraError: the gguf package is not installed.
    """
    import torch

    from xmac_cli.models.loading import DTYPES, quiet_transformers, resolve_dtype

    progress = progress or NullProgress()
    read_gguf_header(path)
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("demo-models", "read GGUF files")
    wanted = DTYPES["bfloat16"] if dtype == "auto" else resolve_dtype(dtype)
    quiet_transformers()
    progress.note(f"reading {path.name}")
    source, tokenizer = _read(path)
    ids = torch.tensor([tokenizer(_PROBE)["input_ids"]])
    with torch.inference_mode():
        expected = source(input_ids=ids).logits.float()
    progress.note("writing the checkpoint directory")
    model = _plain_model(source, wanted)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits.float()
    _save(model, tokenizer, directory, path.stem)
    return ImportedModel(
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(wanted).removeprefix("torch."),
        max_logit_difference=float((logits - expected).abs().max()),
        same_argmax=bool((logits.argmax(-1) == expected.argmax(-1)).all()),
    )


def _read(path: Path) -> tuple[Any, Any]:
    """De-quantised float32 model in eval mode, and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(path.absolute().parent)
    try:
        # The GGUF reader draws a progress bar that no setting switches off.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)
    except _LOADER_ERRORS as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "not supported" in reason:
            raise UnsupportedModelError(f"transformers cannot read {path.name} from GGUF: {reason}") from error
        raise InputError(f"{path} is no GGUF file that transformers can read: {reason}") from error
    return model.eval(), tokenizer


def _plain_model(source: Any, dtype: Any) -> Any:
    """The same weights in a model that transformers does not take for quantised."""
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = ""
    config.__dict__.pop("_model_name_or_path", None)
    config.dtype = dtype
    model = type(source)(config).to(dtype).eval()
    state = {name: tensor.to(dtype) for name, tensor in source.state_dict().items()}
    model.load_state_dict(state, strict=True)
    model.tie_weights()
    generation = source.generation_config
    # Left in, this private mark makes transformers rebuild the generation config from the model's.
    generation.__dict__.pop("_from_model_config", None)
    model.generation_config = generation
    return model


def _save(model: Any, tokenizer: Any, directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        file.chmod(0o644)
    _tidy_tokenizer_config(directory / "tokenizer_config.json")
    card = f"# {name}\n\nDe-quantised by `xmac import-gguf` from `{name}.gguf`, and no better than that file.\n"
    (directory / "README.md").write_text(card, encoding="utf-8")


def _tidy_tokenizer_config(path: Path) -> None:
    """Drop how the tokenizer was loaded, and name the class that readers other than transformers 5 know too."""
    document = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in document.items() if key not in ("is_local", "local_files_only")}
    if kept.get("tokenizer_class") == "TokenizersBackend":
        kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


_PROBE = "The quick brown fox jumps over the lazy dog. In 1903, two brothers"
