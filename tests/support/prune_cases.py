"""Short ways to say "cut exactly these experts" and "a checkpoint with exactly these tensors" in tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.layout import Layout, sniff_layout
from xmac_cli.prune_moe.plan import make_plan
from xmac_cli.prune_moe.plan_file import Plan
from xmac_cli.prune_moe.scores import ExpertScores, LayerScores
from xmac_cli.prune_moe.surgery import apply_plan


def scores_of(layout: Layout, phi: Mapping[int, Sequence[float]]) -> ExpertScores:
    """Scores by decoder layer."""
    layers = tuple(LayerScores(b.name, b.layer, np.asarray(phi[b.layer], np.float64)) for b in layout.layers)
    return ExpertScores("test", layers)


def scores_keeping(layout: Layout, kept: Mapping[int, Sequence[int]]) -> ExpertScores:
    """Scores whose best experts are the kept ones."""
    return scores_of(
        layout, {layer: [float(e in set(ids)) for e in range(layout.num_experts)] for layer, ids in kept.items()}
    )


def random_scores(layout: Layout, seed: int = 0) -> ExpertScores:
    """Different random scores for every layer."""
    rng = np.random.default_rng(seed)
    return scores_of(layout, {block.layer: rng.normal(size=layout.num_experts) for block in layout.layers})


def prune_to(source: Path, result: Path, kept: Mapping[int, Sequence[int]], **options: Any) -> tuple[Layout, Plan]:
    """Cut a checkpoint so that exactly `kept` experts stay, the same number in every layer."""
    layout = sniff_layout(source)
    count = len(next(iter(kept.values())))
    plan = make_plan(layout, scores_keeping(layout, kept), Budget.of(keep=count), **options)
    assert {layer.layer: list(layer.keep) for layer in plan.layers} == {k: list(v) for k, v in kept.items()}
    assert apply_plan(source, result, plan)
    return layout, plan


def write_files(directory: Path, config: dict[str, Any], *shards: Mapping[str, np.ndarray]) -> Path:
    """A checkpoint directory with these tensors: one file, or several with an index."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if len(shards) == 1:
        save_file(dict(shards[0]), directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(tensors), directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return directory


def mixtral_config(experts: int = 4, **keys: Any) -> dict[str, Any]:
    """A config that sniffing accepts for `mixtral_tensors`."""
    return {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "hidden_size": 6,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        **keys,
    }


def mixtral_tensors(experts: int = 4, layers: Sequence[int] = (0, 1), *, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a made-up Mixtral with hidden size 6 and expert width 3."""
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": rng.normal(size=(10, 6)).astype(np.float32)}
    for layer in layers:
        block = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{block}.gate.weight"] = rng.normal(size=(experts, 6)).astype(np.float32)
        for expert in range(experts):
            for name, shape in (("w1", (3, 6)), ("w2", (6, 3)), ("w3", (3, 6))):
                tensors[f"{block}.experts.{expert}.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    return tensors


def read_all(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, read by the safetensors library."""
    from safetensors.numpy import load_file

    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def tree_hash(directory: Path) -> dict[str, str]:
    """sha256 of every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
