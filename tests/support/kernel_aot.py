"""Compile a Triton kernel for a GPU that is not there, and read what the assembler says about it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Shared memory a block may use, bytes.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Compiled:
    """What one compilation produced.

    Args:
        shared: bytes of shared memory a block.
        registers: registers a thread, from ptxas -v.
        spills: bytes spilled to local memory, from ptxas -v.
        sass: disassembled machine code.
    """

    shared: int
    registers: int
    spills: int
    sass: str

    def count(self, instruction: str) -> int:
        """How often a machine instruction occurs."""
        return len(re.findall(rf"\b{re.escape(instruction)}", self.sass))


def compile_for(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    arch: int,
    num_warps: int,
    divisible: tuple[str, ...] = (),
) -> Compiled:
    """Compile for sm_<arch>.

    Args:
        kernel: a `triton.jit` function.
        signature: type of every parameter in order; "constexpr" for compile-time constants.
        constants: values of the compile-time constants.
        arch: compute capability as 80, 90, ...
        num_warps: warps per program.
        divisible: parameters known to be multiples of 16, as the launcher would find out.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assembler = knobs.nvidia.ptxas_blackwell.path if arch >= 90 else knobs.nvidia.ptxas.path
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(built.asm["ptx"])
        command = [assembler, "-v", f"--gpu-name={name}", str(ptx), "-o", str(cubin)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        disassembler = Path(assembler).with_name("nvdisasm")
        sass = subprocess.run([str(disassembler), str(cubin)], check=True, capture_output=True, text=True).stdout
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    if registers is None:
        raise AssertionError(f"ptxas did not report registers: {report}")
    return Compiled(built.metadata.shared, int(registers[1]), sum(map(int, spills)), sass)
