"""Adapters' folders, and engines that take adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_testing.fakes.engine import FakeEngine, fake_served_model

MakeFolder = Callable[..., str]
BASE = "fake-model"


@pytest.fixture
def adapter(tmp_path: Path) -> MakeFolder:
    """``adapter(name, **config)``: the path of a new adapter's folder."""

    def make(name: str, **config: Any) -> str:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        words = {"peft_type": "LORA", "base_model_name_or_path": BASE, "r": 4, **config}
        (folder / "adapter_config.json").write_text(json.dumps(words))
        (folder / "adapter_model.safetensors").write_bytes(b"")
        return str(folder)

    return make


@pytest.fixture
def engine() -> FakeEngine:
    """One that takes adapters."""
    return FakeEngine("hello", model=fake_served_model(max_loras=2))
