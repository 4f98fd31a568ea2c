"""Does the pruned model compute what the source computes when the dropped experts are masked? By running both.

"block": one MoE layer at a time, weights in float32, seeded random hidden states [1, T, d]; only the tensors of that
layer are read, and transformers' own conversion table puts them into the module. "logits": both models in full.
The masked source follows the semantics of V(S): router logits of absent experts are -inf before softmax and top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.tensors import read_tensor
from xmac_cli.cli.errors import ConstraintError, UnsupportedModelError, VerificationError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.prune_moe.families import config_value
from xmac_cli.prune_moe.layout import Layout, MoELayer, is_next_token_name, sniff_layout, tower_of
from xmac_cli.prune_moe.plan_file import Plan

if TYPE_CHECKING:
    import numpy as np
    import torch

TOLERANCE = 1e-5
# transformers 5.24 fails when the whole model is called without images.
_TEXT_MODEL = {"llama4": "language_model"}
_DEQUANTISED_LOAD = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


@dataclass(frozen=True)
class Difference:
    """How far the pruned result is from the masked source.

    Args:
        name: block, or "logits".
        largest: largest absolute difference.
        scale: largest absolute value of the masked source's output.
    """

    name: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """The difference in units of the output, but never magnified for small outputs."""
        return self.largest / max(1.0, self.scale)


def verify_blocks(
    layout: Layout,
    plan: Plan,
    result: Path,
    *,
    tokens: int = 64,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    progress: Progress | None = None,
) -> list[Difference]:
    """Compare every MoE block of the pruned checkpoint with the masked block of the source.

    Args:
        layout: of the source.
        plan: that was applied.
        result: the pruned directory.
        tokens: T, random hidden states per block.
        seed: of the hidden states.
        tolerance: on `Difference.relative`.

    Raises:
        VerificationError: a block differs, or its tensors do not fill the module.
        ConstraintError: the checkpoint is quantised.
        UnsupportedModelError: the installed transformers cannot load a single block.
    """
    import torch

    from xmac_cli.prune_moe.routing import masked_routing

    if config_value(layout.checkpoint.config, ("quantization_config",)) is not None:
        raise ConstraintError(
            "--verify block computes with float weights, and this checkpoint is quantised",
            "use --verify files (exact for every dtype), or --verify logits",
        )
    source, pruned = _Skeleton(layout.checkpoint), _Skeleton(Checkpoint.open(result))
    pruned_layers = {layer.layer: layer for layer in sniff_layout(pruned.checkpoint).layers}
    width = int(config_value(layout.checkpoint.config, ("hidden_size", "d_model")))
    generator = torch.Generator().manual_seed(seed)
    found = []
    with (progress or NullProgress()).task("verifying", total=len(plan.layers), unit="layers") as task:
        for layer, choice in zip(layout.layers, plan.layers):
            hidden = torch.randn(1, tokens, width, generator=generator)
            with source.block(layer) as (model, entry):
                mask = {entry.name: _mask(choice.keep, plan.n_before)}
                with torch.no_grad(), masked_routing(model, mask, modules=[entry]):
                    expected = _output(entry.block(hidden))
            with pruned.block(pruned_layers[layer.layer]) as (_, entry), torch.no_grad():
                computed = _output(entry.block(hidden))
            found.append(_compare(choice.name, expected, computed, tolerance))
            task.advance()
    return found


def verify_logits(
    layout: Layout,
    plan: Plan,
    result: Path,
    *,
    sequences: int = 2,
    length: int = 32,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    device: str = "cpu",
) -> Difference:
    """Compare logits of the whole pruned model with those of the masked source, in float32.

    Args:
        sequences, length: shape of the random token ids.
        device: "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        UsageError: there is no such device.
        VerificationError: logits differ, or transformers reports missing or unexpected keys.
    """
    import torch

    from xmac_cli.models.loading import resolve_device
    from xmac_cli.prune_moe.routing import masked_routing, moe_modules

    place = resolve_device(device)
    vocabulary = int(config_value(layout.checkpoint.config, ("vocab_size",)))
    ids = torch.randint(0, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(seed)).to(place)
    keep = {layer.layer: layer.keep for layer in plan.layers}
    model = _load(layout.checkpoint.path, place)
    entries = moe_modules(model)
    mask = {entry.name: _mask(keep[entry.layer], plan.n_before) for entry in entries}
    with torch.no_grad(), masked_routing(model, mask, modules=entries):
        expected = _logits(model, ids)
    del model, entries
    with torch.no_grad():
        computed = _logits(_load(result, place), ids)
    return _compare("logits", expected, computed, tolerance)


def _mask(keep: tuple[int, ...], num_experts: int) -> np.ndarray:
    import numpy as np

    mask = np.zeros(num_experts, dtype=bool)
    mask[list(keep)] = True
    return mask


def _output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _compare(name: str, expected: torch.Tensor, computed: torch.Tensor, tolerance: float) -> Difference:
    if expected.shape != computed.shape:
        raise VerificationError(f"{name}: shape {list(computed.shape)} instead of {list(expected.shape)}")
    difference = Difference(name, float((expected - computed).abs().max()), float(expected.abs().max()))
    if not difference.relative < tolerance:  # also catches NaN
        raise VerificationError(
            f"{name} of the pruned model differs from the masked source by {difference.largest:.3g} "
            f"(outputs up to {difference.scale:.3g}, tolerance {tolerance:g})"
        )
    return difference


class _Skeleton:
    """A model without weights, of which one MoE block at a time is filled."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        import torch
        from transformers import AutoConfig

        from xmac_cli.models.loading import quiet_transformers

        quiet_transformers()
        self.checkpoint = checkpoint
        config = AutoConfig.from_pretrained(checkpoint.path)
        with torch.device("meta"):
            self.model = _model_class(config)._from_config(config, dtype=torch.float32).eval()

    def block(self, layer: MoELayer) -> _FilledBlock:
        return _FilledBlock(self, layer)


class _FilledBlock:
    """Context manager: the weights of one block, read on entry and forgotten on exit."""

    def __init__(self, skeleton: _Skeleton, layer: MoELayer) -> None:
        self._skeleton = skeleton
        self._layer = layer
        self._entry: Any = None

    def __enter__(self) -> tuple[Any, Any]:
        from xmac_cli.prune_moe.routing import moe_modules

        checkpoint, model = self._skeleton.checkpoint, self._skeleton.model
        self._entry = next(entry for entry in moe_modules(model) if entry.layer == self._layer.layer)
        tensors = {name: read_tensor(checkpoint.tensors[name]).float() for name in self._names()}
        unexpected = _fill(model, tensors)
        block = self._entry.block
        empty = [name for name, tensor in (*block.named_parameters(), *block.named_buffers()) if tensor.is_meta]
        if unexpected or empty:
            raise VerificationError(
                f"{self._layer.name} of {checkpoint.path} does not fill the module of transformers: "
                + ", ".join(
                    [*(f"{name} is missing" for name in empty), *(f"{name} is extra" for name in unexpected)][:3]
                )
            )
        return model, self._entry

    def __exit__(self, *_: object) -> None:
        self._skeleton.model.to("meta")

    def _names(self) -> list[str]:
        """Tensors of the block, and norms of its decoder layer: some classes put one of these into the block."""
        parent = self._layer.name.rpartition(".")[0] + "."
        tensors = self._skeleton.checkpoint.tensors
        norms = [name for name, info in tensors.items() if name.startswith(parent) and len(info.shape) == 1]
        return list(dict.fromkeys((*self._layer.claims, *norms)))


def _fill(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Load some tensors into a model with transformers' conversion table; returns names that fit nowhere."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig
    except ImportError as error:
        raise UnsupportedModelError(
            f"the installed transformers cannot load a single block ({error})", "use --verify files or --verify logits"
        ) from error
    import torch

    settings = LoadStateDictConfig(dtype=torch.float32, weight_mapping=get_model_conversion_mapping(model))
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), settings)
    return sorted(info.unexpected_keys) + sorted(str(key) for key in info.mismatched_keys)


def _model_class(config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    raise UnsupportedModelError(
        f"transformers {transformers.__version__} has no class {config.architectures}", "use --verify files"
    )


def _load(directory: Path, device: torch.device) -> Any:
    import torch
    import transformers

    from xmac_cli.models.loading import quiet_transformers
    from xmac_cli.prune_moe.routing import moe_modules

    quiet_transformers()
    config = transformers.AutoConfig.from_pretrained(directory)
    options: dict[str, Any] = {"dtype": torch.float32}
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method in _DEQUANTISED_LOAD:
        quantisation = getattr(transformers, _DEQUANTISED_LOAD[method])
        options["quantization_config"] = quantisation(dequantize=True)
    model, info = _model_class(config).from_pretrained(directory, output_loading_info=True, **options)
    # transformers runs no next-token layers, and its ignore lists only know the depths of published models.
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    tower = tower_of(moe_modules(model)[0].name)
    info["unexpected_keys"] = [key for key in info["unexpected_keys"] if not is_next_token_name(key, depth, tower)]
    problems = {kind: sorted(map(str, keys))[:3] for kind, keys in info.items() if keys}
    if problems:
        raise VerificationError(f"transformers does not load {directory} completely: {problems}")
    return model.float().to(device).eval()


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    runner = getattr(model, _TEXT_MODEL.get(model.config.model_type, ""), model)
    return runner(input_ids=ids, use_cache=False).logits.float().cpu()
