"""Print registers, spills, shared memory and vector loads of every kernel, compiled for GPUs that need not be there.

python tests/support/kernel_table.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "kernels"), str(root / "tests")]

from support.kernel_aot import Compiled, compile_for
from xmac_kernels.launch import launch_config

COALITION_SIGNATURE = {
    "order_ptr": "*i16",
    "weight_ptr": "*fp32",
    "gram_ptr": "*fp32",
    "full_ptr": "*fp32",
    "mask_ptr": "*i8",
    "out_ptr": "*fp64",
    "tokens": "i32",
    "n": "i32",
    "coalitions": "i32",
    "scale": "fp32",
    "epsilon": "fp32",
    "k": "constexpr",
    "MODE": "constexpr",
    "NP": "constexpr",
    "KP": "constexpr",
    "BLOCK_T": "constexpr",
}
ARCHITECTURES = (80, 86, 90, 100)
SHAPES = ((8, 2), (64, 8), (256, 8))


def compile_coalition(arch: int, n: int, k: int, mode: int) -> Compiled:
    """coalition_residual for n experts (a power of two) and top-k; mode as in the kernel."""
    from xmac_kernels.coalition.kernel import coalition_residual_kernel
    from xmac_kernels.coalition.triton_gpu import LAUNCH_TABLE

    config = launch_config(LAUNCH_TABLE, arch, n, k)
    pointers = tuple(name for name, kind in COALITION_SIGNATURE.items() if kind.startswith("*"))
    return compile_for(
        coalition_residual_kernel,
        COALITION_SIGNATURE,
        {"k": k, "MODE": mode, "NP": n, "KP": k, "BLOCK_T": config.block_tokens},
        arch=arch,
        num_warps=config.num_warps,
        divisible=pointers + (("n",) if n % 16 == 0 else ()),
    )


def rows() -> Sequence[tuple[object, ...]]:
    """(operation, shape, arch, registers, spilled bytes, shared bytes, 128-bit loads)."""
    found = []
    for n, k in SHAPES:
        for arch in ARCHITECTURES:
            built = compile_coalition(arch, n, k, mode=0)
            vectors = built.count("LDG.E.128")
            name = f"n = {n}, k = {k}"
            found.append(
                ("coalition_residual", name, f"sm_{arch}", built.registers, built.spills, built.shared, vectors)
            )
    return found


def main() -> None:
    columns = ("operation", "shape", "arch", "registers", "spills, B", "shared, B", "LDG.E.128")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for row in rows():
            print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
