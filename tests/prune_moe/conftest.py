"""Shared fixtures of the prune-moe tests."""

from __future__ import annotations

import pytest
from support.shapley_fixture import Fixture, load_fixture


@pytest.fixture(scope="session")
def enumerated_game() -> Fixture:
    """The trained 12-expert model with the values of all its coalitions; made once per test session."""
    return load_fixture()
