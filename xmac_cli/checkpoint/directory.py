"""A model directory in the Hugging Face layout, opened by reading nothing but JSON and safetensors headers.

Which files are the model: the shards named by `model.safetensors.index.json`; else `model.safetensors`; else a complete
`model-00001-of-0000N.safetensors` set; else the only other safetensors file that is no adapter or duplicate. Anything
that transformers and this reader could understand differently (stale shards beside new ones, a tensor in two shards) is
refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.auxiliary import find_auxiliary_files
from xmac_cli.checkpoint.files import contained_file, read_json_object
from xmac_cli.checkpoint.header import ShardHeader, TensorInfo, read_header
from xmac_cli.cli.errors import InputError, UnsupportedModelError

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD_NAME = re.compile(r"model-(\d{5,})-of-(\d{5,})\.safetensors")
_NOT_THE_MODEL = re.compile(r"(adapter_|consolidated|optimizer|scheduler|training_|rng_)")


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint directory.

    Args:
        path: the directory, absolute; symbolic links in it are not resolved.
        config: parsed config.json, key order kept.
        shards: headers in file-name order.
        index: parsed model.safetensors.index.json, or None for a single file or a set without index.
        auxiliary_files: relative paths that belong to the model but hold no weights (tokenizer, code, licence, ...).
        ignored_files: relative paths that a copy leaves out (duplicate weights, adapters, files of unknown kind).
    """

    path: Path
    config: dict[str, Any]
    shards: tuple[ShardHeader, ...]
    index: dict[str, Any] | None
    auxiliary_files: tuple[Path, ...]
    ignored_files: tuple[Path, ...]

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Read config, index and all headers of a model directory.

        Args:
            path: the directory.

        Raises:
            InputError: something in it is missing, broken or ambiguous.
            UnsupportedModelError: a complete directory, but of an adapter or a pipeline instead of a model.
        """
        root = Path(os.path.abspath(path))  # noqa: PTH100  (Path.absolute keeps "..")
        if not root.is_dir():
            raise InputError(f"{root} is not a directory", "pass the directory that holds config.json")
        try:
            config = _read_config(root)
            index, names = _find_shards(root)
            shards = tuple(read_header(contained_file(root, name)) for name in names)
            _check_tensors(root, shards, index)
            auxiliary, ignored = find_auxiliary_files(root, config, weights=frozenset(names))
        except OSError as error:  # no permission, a link that leads to itself, a failing disk
            raise InputError(f"{root} cannot be read: {error.strerror} ({error.filename})") from error
        return cls(root, config, shards, index, auxiliary, ignored)

    @property
    def name(self) -> str:
        """Name for people: the directory's, or ORG/NAME for a snapshot in a hub cache."""
        repository = self.path.parent.parent.name
        if self.path.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/")
        return self.path.name

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors by name, in the order of the shards and of the data in them."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without headers: what an index calls total_size."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def total_parameters(self) -> int:
        """Stored elements of all tensors (a packed 4-bit weight counts as what its dtype says)."""
        return sum(tensor.numel for tensor in self.tensors.values())


def _read_config(root: Path) -> dict[str, Any]:
    path = root / CONFIG_NAME
    if not os.path.lexists(path):
        if os.path.lexists(root / "adapter_config.json"):
            raise UnsupportedModelError(f"{root} is an adapter, not a model", "merge it into its base model first")
        if os.path.lexists(root / "model_index.json"):
            raise UnsupportedModelError(f"{root} is a pipeline of several models", "pass one of its sub-directories")
        raise InputError(f"{root} has no {CONFIG_NAME}", "pass a model directory in the Hugging Face layout")
    return read_json_object(contained_file(root, CONFIG_NAME))


def _find_shards(root: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return (parsed index or None, names of the files that hold the model, sorted)."""
    names = (entry.name for entry in os.scandir(root))
    present = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("."))
    standard = [name for name in present if name == SINGLE_NAME or _SHARD_NAME.fullmatch(name)]
    if os.path.lexists(root / INDEX_NAME):
        index = read_json_object(contained_file(root, INDEX_NAME))
        listed = sorted(set(_weight_map(root, index).values()))
        stray = [name for name in standard if name not in listed]
        if stray:
            raise InputError(
                f"{root}: {_some(stray)} lie beside {INDEX_NAME} but are not in it",
                "remove the files of the other version, or the index if it is stale",
            )
        return index, listed
    if SINGLE_NAME in standard:
        if len(standard) > 1:
            raise InputError(f"{root}: both {SINGLE_NAME} and {_some(standard[1:])}; which one is the model?")
        return None, standard
    if standard:
        return None, _complete_set(root, standard)
    others = [name for name in present if not _NOT_THE_MODEL.match(name)]
    if len(others) == 1:
        return None, others
    if others:
        raise InputError(f"{root}: {_some(others)} could all be the model", f"rename the right one to {SINGLE_NAME}")
    raise InputError(
        f"{root} has no safetensors weights of a model",
        "convert pickle weights (*.bin) to safetensors first; GGUF files: xmac import-gguf",
    )


def _weight_map(root: Path, index: dict[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{root / INDEX_NAME}: weight_map is missing or empty")
    for name in set(map(str, weight_map.values())):
        if "/" in name or not name.endswith(".safetensors"):
            raise InputError(f"{root / INDEX_NAME}: {name[:200]!r} is not the name of a safetensors file beside it")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise InputError(f"{root / INDEX_NAME}: weight_map must map tensor names to file names")
    return weight_map


def _complete_set(root: Path, names: list[str]) -> list[str]:
    numbers = [tuple(map(int, match.groups())) for name in names if (match := _SHARD_NAME.fullmatch(name))]
    total = numbers[0][1]
    if sorted(numbers) != [(number, total) for number in range(1, total + 1)]:
        raise InputError(
            f"{root}: {_some(names)} are not a complete set and there is no {INDEX_NAME}", "download again"
        )
    return names


def _check_tensors(root: Path, shards: tuple[ShardHeader, ...], index: dict[str, Any] | None) -> None:
    home: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in home:
                raise InputError(f"{root}: tensor {name[:200]!r} is in {home[name]} and in {shard.path.name}")
            home[name] = shard.path.name
    if index is None:
        return
    weight_map = index["weight_map"]
    wrong = [name for name, file in weight_map.items() if home.get(name) != file]
    if wrong:
        name = wrong[0]
        raise InputError(
            f"{root}: the index says that {name[:200]!r} is in {weight_map[name]}, but it is not "
            f"({len(wrong)} such entries)",
            "index and shards are of different versions; download again",
        )
    unlisted = [name for name in home if name not in weight_map]
    if unlisted:
        name = unlisted[0]
        raise InputError(
            f"{root}: {home[name]} holds {name[:200]!r}, which the index does not list ({len(unlisted)} such tensors)",
            "index and shards are of different versions; download again",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
