"""Imports run one way: kernels, then the shared floors, then the methods, then the list of verbs.

Read from the syntax tree, so that imports inside functions count too; the list of verbs names its modules as text.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"cli", "checkpoint", "data", "models", "training", "report"}
METHODS = {path.parent.name for path in (ROOT / "xmac_cli").glob("*/command.py")} - SHARED
SOURCES = sorted([*(ROOT / "xmac_cli").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


def imported(node):
    """Dotted names that a node of the tree imports; `from a import b` may mean the module a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports(path):
    """Top floors of xmac that a file imports, such as `xmac_kernels`, `checkpoint` or `prune_moe`."""
    names = [name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for name in imported(node)]
    inside = {name.split(".")[1] for name in names if name.startswith("xmac_cli.")} - {"__version__"}
    return inside | {"xmac_kernels" for name in names if name.split(".")[0] == "xmac_kernels"}


def files_of(floor):
    return [path for path in SOURCES if path.is_relative_to(ROOT / "xmac_cli" / floor)]


def test_every_folder_is_a_shared_floor_or_a_method():
    folders = {path.parent.name for path in (ROOT / "xmac_cli").glob("*/__init__.py")}
    assert folders == SHARED | METHODS
    assert {"prune_moe", "eval_ppl"} <= METHODS


def test_kernels_know_nothing_of_the_command_line():
    kernels = [path for path in SOURCES if path.is_relative_to(ROOT / "kernels")]
    assert len(kernels) > 5
    assert {path: found for path in kernels if (found := imports(path) - {"xmac_kernels"})} == {}
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("floor", sorted(SHARED))
def test_a_shared_floor_imports_no_method(floor):
    allowed = SHARED | {"xmac_kernels"}
    assert {path: found for path in files_of(floor) if (found := imports(path) - allowed)} == {}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_imports_no_other_method(method):
    allowed = SHARED | {"xmac_kernels", method}
    assert {path: found for path in files_of(method) if (found := imports(path) - allowed)} == {}


def test_the_list_of_verbs_imports_only_the_command_line():
    assert imports(ROOT / "xmac_cli" / "app.py") == {"cli"}


def test_a_command_stays_short_and_no_file_is_long():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {
        path: n for path, n in lines.items() if path.name == "command.py" and n > 150 and path.parent.name != "cli"
    } == {}
    assert {path: n for path, n in lines.items() if n >= 400} == {}
