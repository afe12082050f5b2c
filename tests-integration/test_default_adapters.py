"""``default_mm_loras``: the adapter of prompts that bring media and name none, in a model that sees."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from lora_adapters import demo_folder, vision_demo_adapter
from PIL import Image

from headrace import LLM, SamplingParams
from headrace.lora import LoRARequest
from headrace_core.errors import ConfigError

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
WITHOUT = "Hello"


@pytest.fixture(scope="module")
def picture() -> dict[str, Any]:
    """A prompt with an image."""
    return {
        "prompt": "<image>What is this?",
        "multi_modal_data": {"image": Image.new("RGB", (96, 96), "red")},
    }


def told(outputs: Any) -> list[Any]:
    """Tokens and their log-probability."""
    probability = [pytest.approx(o.outputs[0].cumulative_logprob, abs=1e-3) for o in outputs]
    return [(list(o.outputs[0].token_ids), p) for o, p in zip(outputs, probability, strict=True)]


def test_as_if_it_were_named(tmp_path: Path, picture: dict[str, Any]) -> None:
    path = vision_demo_adapter(tmp_path / "sees", 3)
    other = LoRARequest("other", 2, vision_demo_adapter(tmp_path / "other", 4))
    common: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2}
    folder, prompts = demo_folder("vision"), [WITHOUT, picture]
    with LLM(folder, **common) as llm:
        base = told(llm.generate(prompts, PARAMS))
        named = told(
            llm.generate(prompts, PARAMS, lora_request=[None, LoRARequest("sees", 7, path)])
        )
        by_other = told(llm.generate(prompts, PARAMS, lora_request=other))
        chatted = told(llm.chat(_chat(picture), PARAMS, lora_request=LoRARequest("x", 7, path)))
    assert base[1] != named[1] != by_other[1]
    with LLM(folder, default_mm_loras={"image": path}, **common) as llm:
        outputs = llm.generate(prompts, PARAMS)
        assert told(outputs) == named
        assert [o.lora_request for o in outputs] == [None, LoRARequest("image", 1, path)]
        assert told(llm.generate(prompts, PARAMS, lora_request=other)) == by_other
        assert told(llm.chat(_chat(picture), PARAMS)) == chatted


def _chat(picture: dict[str, Any]) -> list[Any]:
    held = io.BytesIO()
    picture["multi_modal_data"]["image"].save(held, "png")
    url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]


def test_needs_adapters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set together with enable_lora"):
        LLM(demo_folder("vision"), default_mm_loras={"image": str(tmp_path)})
