"""`prune-moe --stage apply` on a synthetic sharded checkpoint against `cp -r` of the bytes it keeps, in the same run.

Also: peak memory of apply, and the share of the checkpoint that `inspect` and `--dry-run` read. The size is 6.4 GB
unless XMAC_BENCH_GB says otherwise; three copies must fit on the disk of the temporary directory.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, WIDTH, EXPERTS = 2048, 1024, 32
_READ_BYTES = """
import sys
from xmac_cli.app import run_command_line
code = run_command_line(sys.argv[1:])
sys.stderr.write("rchar " + open("/proc/self/io").read().split()[1] + "\\n")
sys.exit(code)
"""


def make_checkpoint(directory: Path, gigabytes: float) -> int:
    """Write a Qwen3-MoE directory, one layer a shard, filled with repeated random bytes; return its tensor bytes."""
    per_layer = EXPERTS * 3 * HIDDEN * WIDTH * 2
    layers = max(2, round(gigabytes * 1e9 / per_layer))
    directory.mkdir()
    noise = random.Random(0).randbytes(1 << 24)
    weight_map: dict[str, str] = {}
    total = 0
    for layer in range(layers):
        name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        tensors = _layer_tensors(layer, last=layer == layers - 1)
        total += _write_shard(directory / name, tensors, noise)
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(_config(layers), indent=2))
    return total


def _layer_tensors(layer: int, *, last: bool) -> dict[str, list[int]]:
    prefix = f"model.layers.{layer}."
    tensors = {f"{prefix}mlp.gate.weight": [EXPERTS, HIDDEN]}
    for expert in range(EXPERTS):
        for part, shape in (("gate", [WIDTH, HIDDEN]), ("up", [WIDTH, HIDDEN]), ("down", [HIDDEN, WIDTH])):
            tensors[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"] = shape
    for part in "qkvo":
        tensors[f"{prefix}self_attn.{part}_proj.weight"] = [512, HIDDEN] if part != "o" else [HIDDEN, 512]
    if last:
        tensors |= {"model.embed_tokens.weight": [1024, HIDDEN], "model.norm.weight": [HIDDEN]}
    return tensors


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
        "vocab_size": 1024,
    }


def _write_shard(path: Path, tensors: dict[str, list[int]], noise: bytes) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = offset
        while left:
            left -= file.write(noise[: min(left, len(noise))])
    return offset


def timed(command: list[str]) -> tuple[float, int]:
    """Run a command; return wall seconds and peak resident bytes of the child."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sink.seek(0)
            sys.exit(f"{' '.join(command)} failed: {sink.read().decode()}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def read_bytes(arguments: list[str]) -> int:
    """Bytes a verb reads in total, the interpreter's own modules included."""
    done = subprocess.run([sys.executable, "-c", _READ_BYTES, *arguments], capture_output=True, text=True, check=True)
    return int(done.stderr.split("rchar ")[1])


def main() -> None:
    """Print the ratios."""
    xmac = [sys.executable, "-m", "xmac_cli"]
    with tempfile.TemporaryDirectory(prefix="xmac-bench-") as folder:
        work = Path(folder)
        source, pruned, copied = work / "source", work / "pruned", work / "copied"
        total = make_checkpoint(source, float(os.environ.get("XMAC_BENCH_GB", "6.4")))
        layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
        _print_reads(source, total)
        plan = work / "plan.json"
        _make_plan(source, plan)
        os.sync()
        ratios, synced, memory = [], [], []
        print(f"source {total / 1e9:.2f} GB in {layers} shards")
        for level in ("none", "none", "none", "files"):
            options = ["--stage", "apply", "--plan", str(plan), "--verify", level, "--quiet", "--overwrite"]
            ours, peak = timed([*xmac, "prune-moe", str(source), str(pruned), *options])
            os.sync()
            plain, _ = timed(["cp", "-r", str(pruned), str(copied)])
            tail, _ = timed(["sync"])
            shutil.rmtree(copied)
            os.sync()
            memory.append(peak)
            print(f"  apply --verify {level} {ours:.2f} s, cp -r {plain:.2f} s, cp -r and sync {plain + tail:.2f} s")
            if level == "none":
                ratios.append(ours / plain)
                synced.append(ours / (plain + tail))
        kept = sum(p.stat().st_size for p in pruned.iterdir())
        print(f"kept {kept / 1e9:.2f} GB; apply includes sha256 of all of it, and sync")
        print(f"apply / cp -r: median {statistics.median(ratios):.2f} (goal at most 1.3)")
        print(f"apply / (cp -r and sync): median {statistics.median(synced):.2f}")
        print(f"peak resident memory of apply: {max(memory) / 1e6:.0f} MB (goal below 400)")


def _print_reads(source: Path, total: int) -> None:
    for arguments in (["inspect", str(source)], ["prune-moe", str(source), "--ratio", "0.25", "--dry-run"]):
        amount = read_bytes(arguments)
        words = " ".join(a for a in arguments if a != str(source))
        print(f"{words} reads {amount / 1e6:.1f} MB, {amount / total:.2%} of the checkpoint (goal below 1 %)")


def _make_plan(source: Path, plan: Path) -> None:
    """A random plan through the same functions the verb uses."""
    import numpy as np

    from xmac_cli.prune_moe.budget import Budget
    from xmac_cli.prune_moe.layout import sniff_layout
    from xmac_cli.prune_moe.plan import make_plan, save_plan
    from xmac_cli.prune_moe.scores import ExpertScores, LayerScores

    rng = np.random.default_rng(0)
    layout = sniff_layout(source)
    scores = ExpertScores("random", tuple(LayerScores(b.name, b.layer, rng.random(EXPERTS)) for b in layout.layers))
    save_plan(plan, make_plan(layout, scores, Budget.of(ratio=0.25)))


if __name__ == "__main__":
    main()
