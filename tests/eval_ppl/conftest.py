"""A small random float64 checkpoint with a character tokenizer, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.data_tokenizers import CHARACTERS, character_tokenizer
from support.models_small import small_llama


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("eval") / "model"
    small_llama(seed=4, vocabulary=3 + len(CHARACTERS)).double().save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory
