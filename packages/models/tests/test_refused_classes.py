"""Classes that are refused by name, with a sentence of why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_core.platform import CpuPlatform
from headrace_models.resolve import resolve

MONO: dict[str, Any] = {
    "architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
    "vision_config": {"architectures": ["InternVisionPatchModel"], "model_type": "intern_vit_6b"},
    "llm_config": {"architectures": ["InternLM2VEForCausalLM"], "model_type": "internlm2"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["PrithviGeoSpatialMAE"]}, "PrithviGeoSpatialMAE is not supported: it makes maps"),
        ({"architectures": ["Terratorch"]}, "Terratorch is not supported: it makes maps"),
        (MONO, "InternLM2VEForCausalLM is not supported: it is Mono-InternVL's decoder"),
    ],
)  # fmt: skip
def test_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=words):
        resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())
