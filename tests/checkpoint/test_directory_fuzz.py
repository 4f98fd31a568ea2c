"""Mutated directories: opening one gives a checkpoint or an XmacError, and never leaves the directory."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoint_files import random_tensors, save_index, save_sharded, tree

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.cli.errors import InputError, XmacError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FILES = st.sampled_from([FIRST, SECOND, "config.json", "../m/" + FIRST, "/etc/passwd", "..", "x.safetensors"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded(
        tmp_path_factory.mktemp("fuzz") / "m", [random_tensors(["a", "b"], 1), random_tensors(["c"], 2)]
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weight_map=st.dictionaries(st.sampled_from(["a", "b", "c", "d", ""]), FILES | st.text(max_size=5)))
def test_only_the_true_weight_map_opens(model: Path, weight_map: dict[str, Any]) -> None:
    save_index(model, weight_map)
    true = {"a": FIRST, "b": FIRST, "c": SECOND}
    if weight_map == true:
        assert set(Checkpoint.open(model).tensors) == set(true)
    else:
        with pytest.raises(InputError):
            Checkpoint.open(model)
    save_index(model, true)
    assert set(Checkpoint.open(model).tensors) == set(true)


def test_a_thousand_injured_directories_open_or_raise_our_error(model: Path, tmp_path: Path) -> None:
    dice = random.Random(7)
    opened = 0
    pristine = tree(model)
    (tmp_path / "secret").write_bytes(b"{}")
    for _ in range(1_000):
        root = tmp_path / "m"
        root.mkdir()
        for name, content in pristine.items():
            (root / name).write_bytes(content)
        for _ in range(dice.randint(1, 2)):
            injure(root, dice)
        try:
            opened += Checkpoint.open(root).total_bytes >= 0
        except XmacError as error:
            assert error.message
        shutil.rmtree(root)
    assert 10 < opened < 900
    assert (tmp_path / "secret").read_bytes() == b"{}"


def injure(root: Path, dice: random.Random) -> None:
    """Damage one file of the directory, or add one; nothing is ever written through a link."""
    path = dice.choice(sorted(root.iterdir()))
    plain = path.is_file() and not path.is_symlink()
    content = bytearray(path.read_bytes()) if plain else bytearray(b"{}")
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
    kind = dice.randrange(7)
    if kind == 0:
        return
    if kind == 1:
        content[dice.randrange(min(len(content), 400))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
    elif kind == 2:
        path.write_bytes(content[: dice.randrange(len(content) + 1)])
    elif kind == 3:
        path.write_bytes(content + dice.randbytes(9))
    elif kind == 4:
        path.symlink_to(dice.choice(["nowhere", path.name, "../secret", "..", "config.json", "."]))
    elif kind == 5:
        other = path.with_name(dice.choice(["model.safetensors", "other.safetensors", "x"]))
        other.unlink(missing_ok=True)
        other.write_bytes(content)
    else:
        path.mkdir()
