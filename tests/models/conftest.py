"""One tiny demo MoE for all tests of this area."""

from __future__ import annotations

import pytest

from xmac_cli.models.demo_cache import DemoMoe, cached_demo_moe


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> DemoMoe:
    return cached_demo_moe(tmp_path_factory.mktemp("demo-cache"), size="tiny")
