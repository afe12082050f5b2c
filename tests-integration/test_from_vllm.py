"""The page for those who come from vLLM: its names exist, and its class computes what the original did."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace_core import plugins
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import PluginError, WeightsError
from headrace_core.platform import CpuPlatform
from headrace_core.plugins import ModelRegistry
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise

PAGE = Path(__file__).parents[1] / "docs" / "extending" / "from-vllm.md"
ROW = re.compile(r"^\| (.*?) \| `([\w.]+)` \| (.*?) ?\|$", re.MULTILINE)
THEIRS = (
    "vllm_config", "prefix", "SupportsMultiModal", "SupportsTranscription",
    "MULTIMODAL_REGISTRY.register_processor", "WeightsMapper", "AutoWeightsLoader", "ParallelLMHead",
    "LogitsProcessor", "maybe_prefix", "cached_processor_from_config", "packed_modules_mapping",
    "forward", "intermediate_tensors", "inputs_embeds", "compute_logits", "load_weights",
    "get_language_model", "embed_multimodal", "embed_input_ids",
)  # fmt: skip
"""What classes in the wild use."""
PROMPT = list(range(3, 20))


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def found(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one; a field of a class counts."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(thing, part) and part not in getattr(thing, "__annotations__", {}):
                return False
            thing = getattr(thing, part, None)
        return True
    return False


def test_every_name_of_ours_exists() -> None:
    rows = ROW.findall(text())
    lines = [
        line for line in text().splitlines() if line.startswith("| ") and "| here |" not in line
    ]
    assert len(rows) == len(lines), "a row has another form"
    names = [ours for _, ours, _ in rows]
    names += [name for _, _, note in rows for name in re.findall(r"`(headrace[\w.]+)`", note)]
    missing = [name for name in names if name.startswith("headrace_") and not found(name)]
    assert missing == []
    import headrace

    assert headrace.ModelRegistry is ModelRegistry


def test_every_name_of_theirs_is_told() -> None:
    theirs = " ".join(row[0] for row in ROW.findall(text()))
    assert [name for name in THEIRS if not re.search(rf"\b{re.escape(name)}\b", theirs)] == []


def test_a_class_as_it_was_is_told_what_to_take() -> None:
    class Old:
        def __init__(self, *, vllm_config: object, prefix: str = "") -> None: ...

    with pytest.raises(PluginError, match=r'must take \(context, prefix=""\).*from-vllm'):
        ModelRegistry.register_model("OldForCausalLM", Old)


@pytest.fixture
def quill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """Transformers' Llama, and the same as the page's model stores it."""
    import transformers

    (block,) = re.findall(r"^```python\n(.*?)^```", text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, PAGE.name, "exec"), names)
    plugin = plugins.Plugin(
        "headrace.models", "QuillForCausalLM", "page:QuillForCausalLM", "page 1.0",
        held=names["QuillForCausalLM"],
    )  # fmt: skip
    installed = plugins.installed

    def with_quill(group: str) -> Mapping[str, plugins.Plugin]:
        more = {plugin.name: plugin} if group == plugin.group else {}
        return {**installed(group), **more}

    monkeypatch.setattr(plugins, "installed", with_quill)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    randomise(model)
    config = {**model.config.to_dict(), "architectures": ["QuillForCausalLM"],
              "embedding_multiplier": 2.0, "dtype": "float32"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(relaid(model.state_dict()), tmp_path / "model.safetensors")
    with torch.no_grad():
        model.model.embed_tokens.weight *= 2.0
    return model, tmp_path


def relaid(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    spelled = {
        "model.embed_tokens": "transformer.tok", "model.layers": "transformer.blocks",
        "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.q_proj": "attn.wq",
        "self_attn.k_proj": "attn.wk", "self_attn.v_proj": "attn.wv", "self_attn.o_proj": "attn.wo",
        "mlp.down_proj": "ff.down", "model.norm": "transformer.norm", "lm_head": "head",
    }  # fmt: skip
    made = {"vision.proj.weight": torch.ones(2, 2)}
    for name, tensor in tensors.items():
        if "mlp.gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            name, tensor = name.replace("mlp.gate_proj", "ff.up_gate"), torch.cat([up, tensor])
        elif "mlp.up_proj" in name:
            continue
        for old, new in spelled.items():
            name = name.replace(old, new)
        made[name] = tensor.clone()
    return made


def test_the_ported_class_computes_what_llama_does(quill: tuple[Any, Path]) -> None:
    model, folder = quill
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    assert info.source == "plugin:page 1.0"
    ours = PagedDriver(load_model(info, build_context(info)))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    logits = ours.step({"a": PROMPT})
    torch.testing.assert_close(logits[-1], expected, atol=1e-4, rtol=1e-4)


def test_what_is_missing_and_left_over_is_one_error(quill: tuple[Any, Path]) -> None:
    model, folder = quill
    tensors = relaid(model.state_dict())
    del tensors["transformer.norm.weight"], tensors["head.weight"]
    tensors["transformer.extra.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    with pytest.raises(WeightsError) as caught:
        load_model(info, build_context(info))
    for name in ("transformer.norm.weight", "head.weight", "transformer.extra.weight"):
        assert name in str(caught.value)
