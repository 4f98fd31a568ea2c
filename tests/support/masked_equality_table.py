"""Print the masked-equality table: `python tests/support/masked_equality_table.py [TYPE ...]`.

For every supported model type and both file layouts: how far the logits of the pruned files are from the source with
masked routers, and how much the masking changed them. Exits with 1 when one is not below 1e-5.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "kernels"), str(root / "tests")]

from support.prune_cases import prune_to
from support.tiny_moe import TINY, build_tiny, different_kept, load_tiny, logits, masked_logits, probe_tokens, save_tiny

from xmac_cli.prune_moe.layout import sniff_layout

TOLERANCE = 1e-5
BALANCED = ([0, 1, 3, 4, 5, 7], [1, 2, 3, 4, 6, 7], [0, 2, 3, 5, 6, 7])


def measure(model_type: str, directory: Path) -> tuple[str, list[str], float, float]:
    """(family, storage of both layouts, largest difference over both, effect of masking)."""
    model, tokens = build_tiny(model_type), probe_tokens()
    storage: list[str] = []
    difference = effect = 0.0
    family = ""
    for name in ("hub", "fused"):
        source = save_tiny(model, directory / name, fused=name == "fused")
        layout = sniff_layout(source)
        grouped = layout.n_group > 1
        kept = dict(zip(TINY[model_type].moe_layers, BALANCED)) if grouped else different_kept(model_type, 6)
        prune_to(source, directory / f"{name}-pruned", kept)
        pruned, info = load_tiny(directory / f"{name}-pruned", model_type)
        if any(info.values()):
            raise SystemExit(f"{model_type}: transformers reports {info}")
        expected = masked_logits(model, tokens, kept)
        difference = max(difference, float((expected - logits(pruned, tokens)).abs().max()))
        effect = max(effect, float((expected - logits(model, tokens)).abs().max()))
        storage.append(layout.storage)
        family = layout.family.name
    return family, storage, difference, effect


def main(model_types: list[str]) -> int:
    """Print the table as Markdown."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("| model type | row | hub files | saved fused | max abs logit difference | effect of masking |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for model_type in model_types or sorted(TINY):
        with tempfile.TemporaryDirectory() as directory:
            family, (hub, fused), difference, effect = measure(model_type, Path(directory))
        print(f"| {model_type} | {family} | {hub} | {fused} | {difference:.1e} | {effect:.2f} |", flush=True)
        worst = max(worst, difference)
    return int(not worst < TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
