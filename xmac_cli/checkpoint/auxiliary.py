"""Which files travel with a model besides its weights.

A new checkpoint needs the tokenizer, processor, chat templates, generation config, remote code and licence of the old
one. It must not inherit second copies of the weights (pickle, GGUF, ONNX, `original/`, `consolidated*`): they would
still hold the unmodified model. So files are chosen by kind, and what is left out is listed instead of guessed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.files import check_containment
from xmac_cli.cli.errors import InputError

_TEXT_SUFFIXES = frozenset(
    (".json", ".jsonl", ".txt", ".md", ".rst", ".py", ".jinja", ".jinja2", ".yaml", ".yml", ".toml", ".cfg", ".csv")
    + (".tsv", ".model", ".tiktoken", ".vocab", ".merges", ".bpe", ".spm", ".dict", ".pdf", ".png", ".jpg", ".jpeg")
)
_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".h5", ".msgpack", ".npz", ".tflite")
)
_DUPLICATE_FOLDERS = frozenset(("original", "onnx", "openvino", "coreml", "gguf", "mlx", "runs", "logs", "__pycache__"))
_REBUILT = frozenset(("config.json", "xmac.json", "model.safetensors.index.json"))
_LARGEST_BYTES = 256 << 20
_MAX_DEPTH = 4


def find_auxiliary_files(
    root: Path, config: dict[str, Any], weights: frozenset[str]
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Sort the files of a model directory that are not its weights.

    Args:
        root: the directory.
        config: its config.json, which may name attachment folders under "xmac".
        weights: names of the shards.

    Returns:
        (files to copy, files left out), relative paths, sorted. Hidden files are in neither, and attachment folders
        are in neither: they depend on the exact weights, so the verb decides about them.

    Raises:
        InputError: a file that would be copied is a link that leads outside the directory.
    """
    attached = frozenset(attachment_folders(root, config).values())
    copied: list[Path] = []
    ignored: list[Path] = []
    native_format = any(root.glob("consolidated*"))
    for relative in _walk(root, Path(), attached):
        name = relative.as_posix()
        if name in weights or name in _REBUILT:
            continue
        # params.json describes the consolidated weights of Mistral's own format, which stay behind.
        if _is_auxiliary(root, relative) and not (native_format and name == "params.json"):
            check_containment(root, root / relative)
            copied.append(relative)
        else:
            ignored.append(relative)
    return tuple(sorted(copied)), tuple(sorted(ignored))


def attachment_folders(root: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the folder of each attachment (side-car) that config.json names: {name: relative folder}.

    Raises:
        InputError: the "xmac" entry has another shape, or a folder leads outside the directory.
    """
    section = config.get("xmac", {})
    attachments = section.get("attachments", {}) if isinstance(section, dict) else None
    if not isinstance(attachments, dict):
        raise InputError(f"{root / 'config.json'}: 'xmac' must be an object with an object 'attachments'")
    folders: dict[str, str] = {}
    for name, entry in attachments.items():
        folder = entry.get("folder") if isinstance(entry, dict) else None
        if not isinstance(folder, str):
            raise InputError(f"{root / 'config.json'}: attachment {name!r} names no folder")
        folder = folder.rstrip("/")
        if any(part in ("", ".", "..") for part in folder.split("/")) or "\\" in folder or "\0" in folder:
            raise InputError(f"{root / 'config.json'}: folder {folder!r} of attachment {name!r} leads outside")
        check_containment(root, root / folder)
        folders[name] = folder
    return folders


def _walk(root: Path, folder: Path, attached: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for entry in sorted(os.scandir(root / folder), key=lambda entry: entry.name):
        relative = folder / entry.name
        if entry.name.startswith(".") or relative.as_posix() in attached:
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name.lower() not in _DUPLICATE_FOLDERS and len(relative.parts) < _MAX_DEPTH:
                inside = _walk(root, relative, attached)
                # A folder with weights of its own (a training checkpoint, an adapter) is another model.
                found += [] if any(path.suffix in _WEIGHT_SUFFIXES for path in inside) else inside
        elif entry.is_file():
            found.append(relative)
    return found


def _is_auxiliary(root: Path, relative: Path) -> bool:
    name = relative.name
    if name.startswith(("consolidated", "adapter_")) or name.endswith(".index.json"):
        return False
    if relative.suffix and relative.suffix.lower() not in _TEXT_SUFFIXES:
        return False
    return (root / relative).stat().st_size <= _LARGEST_BYTES
