"""Quantized checkpoints of models that also see: their lists of plain layers name modules as the whole does,
and the language model is served with the numbers that the files hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context, randomise

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [5, 90, 17, 33, 2, 8, 120, 64, 7, 7, 41, 99, 3, 18, 77, 52, 6, 110, 13, 29, 31]
TEXT = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "patch_size": 14,
    "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
ROPE = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "mrope_section": [2, 3, 3],
    "mrope_interleaved": True,
}
INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}}},
}  # fmt: skip
LISTS = {
    "names": ["lm_head", "model.visual.blocks.0.attn.qkv", "model.language_model.layers.1.mlp.down_proj",
              "model.language_model.layers.2"],
    "patterns": ["re:.*lm_head", "re:model\\.visual.*", "re:model.language_model.layers.1.mlp.down_proj",
                 "re:^model\\.language_model\\.layers\\.2\\..*"],
}  # fmt: skip
PLAIN = ("lm_head", "model.visual", "model.language_model.layers.1.mlp.down_proj",
         "model.language_model.layers.2.")  # fmt: skip


def checkpoint(folder: Path, quantization: dict[str, Any]) -> Tensor:
    """A checkpoint with int8 weights; returns the log-probabilities that transformers makes of what they
    mean."""
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config=VISION,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3VLForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomise(model)
    model.save_pretrained(folder)
    stored, floats = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor
        if not name.endswith("_proj.weight") or name.startswith(PLAIN):
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 127
        codes = (tensor / scale).round().to(torch.int8)
        stored[name], stored[f"{name}_scale"] = codes, scale
        floats[name] = codes.float() * scale
    assert len(floats) == 7 + 6
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": quantization}))
    _, unexpected = model.load_state_dict(floats, strict=False)
    assert not unexpected
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("entries", LISTS)
def test_plain_layers_are_named_as_the_whole_does(entries: str, tmp_path: Path) -> None:
    wanted = checkpoint(tmp_path, {**INT8, "ignore": LISTS[entries]})
    info = resolve(ModelConfig(model=str(tmp_path), max_model_len=64), LoadConfig(), CpuPlatform())
    context = build_context(info)
    method = quant_method(info, None, context.ops, device=context.device)
    driver = PagedDriver(load_model(info, dataclasses.replace(context, quant=method)))
    found = torch.cat([driver.step({"a": PROMPT[:13]}), driver.step({"a": PROMPT[13:]})])
    torch.testing.assert_close(found.log_softmax(-1), wanted, atol=2e-3, rtol=0)
