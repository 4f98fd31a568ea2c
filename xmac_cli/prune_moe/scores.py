"""Expert scores and the file that carries them from `score` to `plan`.

A score file is `scores.safetensors` (what the program reads) with `scores.json` beside it (the same numbers for
people). Per MoE layer N of the decoder: float64 `phi.N` [n] (higher = keep), float64 `phi_se.N` [n], int64 `evals.N`
[n], and any further per-expert statistic `<statistic>.N` [n] such as `freq`, `gate_mean`, `reap`, `max_activation`.
Layers are matched to a checkpoint by the decoder layer index N, never by module name: module names differ between the
files of a checkpoint and the live model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmac_cli.checkpoint.files import parse_json_object, read_json_object
from xmac_cli.cli.errors import InputError

if TYPE_CHECKING:
    import numpy as np

SCORES_SCHEMA = "xmac/expert-scores/1"
TENSOR_FILE = "scores.safetensors"
JSON_FILE = "scores.json"
_METADATA_KEY = "xmac_scores"
_PHI, _SE, _EVALS = "phi", "phi_se", "evals"


@dataclass(frozen=True)
class LayerScores:
    """Scores of the n routed experts of one MoE layer.

    Args:
        name: module path of the MoE block, for people; not used for matching.
        layer: index N of the decoder layer.
        phi: float64 [n], the importance; the experts with the lowest values are removed first.
        se: float64 [n] standard error of `phi`, or None when the criterion has no sampling error.
        evals: int64 [n] number of evaluated marginals behind each value, or None.
        extra: further per-expert statistics, each [n], by name (`freq`, `gate_mean`, `reap`, `ean`, `max_activation`).
    """

    name: str
    layer: int
    phi: np.ndarray
    se: np.ndarray | None = None
    evals: np.ndarray | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import numpy as np

        if self.phi.ndim != 1 or self.phi.dtype != np.float64:
            raise InputError(
                f"the scores of layer {self.layer} must be one float64 value per expert, not {self.phi.dtype} "
                f"{list(self.phi.shape)}"
            )
        for label, values in self.statistics():
            if values.shape != self.phi.shape:
                raise InputError(
                    f"`{label}` of layer {self.layer} has shape {list(values.shape)}, expected {list(self.phi.shape)}"
                )
        if not np.isfinite(self.phi).all():
            raise InputError(f"the scores of layer {self.layer} contain a value that is not finite")

    @property
    def num_experts(self) -> int:
        """Number n of routed experts that were scored."""
        return int(self.phi.shape[0])

    def statistics(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every array of the layer with the name it has in the file, without the layer suffix."""
        yield _PHI, self.phi
        if self.se is not None:
            yield _SE, self.se
        if self.evals is not None:
            yield _EVALS, self.evals
        yield from sorted(self.extra.items())


@dataclass(frozen=True)
class ExpertScores:
    """Scores of all MoE layers of a model under one criterion.

    Args:
        criterion: `shapley`, `frequency`, `reap`, ... ; the name that is stored in the plan.
        layers: one entry per MoE layer, ascending by `layer`.
        metadata: JSON-able facts: V_full, V_empty, seed, options, calibration token hash, model fingerprint, versions.
    """

    criterion: str
    layers: tuple[LayerScores, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        indices = [layer.layer for layer in self.layers]
        if indices != sorted(set(indices)):
            raise InputError(f"score layers must be unique and ascending, got {indices}")

    def for_layer(self, layer: int) -> LayerScores:
        """Scores of decoder layer `layer`.

        Raises:
            InputError: the layer was not scored.
        """
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        raise InputError(
            f"the scores have no entry for MoE layer {layer}", hint="score this checkpoint again, or pass --layers"
        )


def save_scores(directory: Path, scores: ExpertScores) -> Path:
    """Write `scores.safetensors` and `scores.json` into a directory (created when absent).

    The bytes are a function of the scores alone, so that equal runs give equal files.

    Returns:
        Path of the safetensors file.
    """
    import numpy as np
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{label}.{layer.layer}": np.ascontiguousarray(values)
        for layer in scores.layers
        for label, values in layer.statistics()
    }
    header = {
        "schema": SCORES_SCHEMA,
        "criterion": scores.criterion,
        "layers": [{"layer": layer.layer, "name": layer.name} for layer in scores.layers],
        "metadata": dict(scores.metadata),
    }
    path = directory / TENSOR_FILE
    save_file(tensors, path, metadata={_METADATA_KEY: json.dumps(header, sort_keys=True)})
    mirror = dict(header)
    mirror["layers"] = [
        {"layer": layer.layer, "name": layer.name}
        | {label: [value.item() for value in values] for label, values in layer.statistics()}
        for layer in scores.layers
    ]
    (directory / JSON_FILE).write_text(json.dumps(mirror, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def load_scores(path: Path) -> ExpertScores:
    """Read scores from a directory, from `scores.safetensors`, or from an edited `scores.json`.

    Args:
        path: a directory written by `save_scores`, or one of the two files.

    Raises:
        InputError: the file is missing, malformed, or has another schema.
    """
    file = score_file(path)
    return _load_json(file) if file.suffix == ".json" else _load_tensors(file)


def score_file(path: Path) -> Path:
    """The file that `load_scores` reads: the tensors of a directory, or its JSON where there are no tensors.

    Raises:
        InputError: there is none.
    """
    file = path
    if path.is_dir():
        file = path / (JSON_FILE if not (path / TENSOR_FILE).exists() and (path / JSON_FILE).exists() else TENSOR_FILE)
    if not file.is_file():
        raise InputError(f"no expert scores at {file}", hint="write them with `xmac prune-moe SRC --stage score`")
    return file


def _load_tensors(file: Path) -> ExpertScores:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as handle:
            text = (handle.metadata() or {}).get(_METADATA_KEY, "{}")
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise InputError(f"{file} is not a readable score file: {error}") from error
    header = parse_json_object(text.encode("utf-8"), f"{_METADATA_KEY} of {file}", allow_constants=True)
    rows = []
    for entry in _entries(header, file):
        suffix = f".{entry['layer']}"
        rows.append(entry | {name.removesuffix(suffix): t for name, t in tensors.items() if name.endswith(suffix)})
    return _build(header, rows, file)


def _load_json(file: Path) -> ExpertScores:
    header = read_json_object(file)
    return _build(header, _entries(header, file), file)


def _entries(header: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    if header.get("schema") != SCORES_SCHEMA:
        raise InputError(f"{file} does not carry the schema {SCORES_SCHEMA!r}")
    layers = header.get("layers")
    if not isinstance(layers, list) or not all(isinstance(e, dict) and type(e.get("layer")) is int for e in layers):
        raise InputError(f"`layers` in {file} must be a list of objects that carry a `layer` number")
    if not isinstance(header.get("metadata") or {}, dict):
        raise InputError(f"`metadata` in {file} must be an object")
    return layers


def _build(header: dict[str, Any], rows: list[dict[str, Any]], file: Path) -> ExpertScores:
    import numpy as np

    layers = []
    for row in rows:
        if _PHI not in row:
            raise InputError(f"{file} has no `{_PHI}` for layer {row['layer']}")
        try:
            arrays = {label: np.asarray(v) for label, v in row.items() if label not in ("layer", "name")}
            layers.append(
                LayerScores(
                    name=str(row.get("name", "")),
                    layer=row["layer"],
                    phi=arrays.pop(_PHI).astype(np.float64),
                    se=arrays.pop(_SE).astype(np.float64) if _SE in arrays else None,
                    evals=arrays.pop(_EVALS).astype(np.int64) if _EVALS in arrays else None,
                    extra=arrays,
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the values of layer {row['layer']} in {file} are not numbers: {error}") from error
    return ExpertScores(str(header.get("criterion", "from-file")), tuple(layers), dict(header.get("metadata") or {}))
