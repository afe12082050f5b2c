"""A tiny Phi-4-multimodal with random weights and two adapters, made by transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_checkpoints import TEXT
from safetensors.torch import load_file
from speech_checkpoints import save_tokenizer

from headrace_testing.model.adapters import write_adapter
from headrace_testing.model.decoders import randomise

SIDE, PATCH = 28, 7
RANKS = {"vision-lora": 4, "speech-lora": 6}
_CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>"
)


def save_phi4_multimodal(folder: Path) -> Mapping[str, Any]:
    """Tiles of 28 x 28 pixels, 4 vectors each. Returns transformers' models: without an adapter (""), and
    by the folder of the adapter that is in their weights."""
    from transformers import (
        Phi4MultimodalAudioConfig,
        Phi4MultimodalConfig,
        Phi4MultimodalForCausalLM,
        Phi4MultimodalVisionConfig,
    )

    names = (
        "<|endoftext|>",
        "<|endoftext10|>",
        "<|endoftext11|>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
    )
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    vision = Phi4MultimodalVisionConfig(
        hidden_size=36, intermediate_size=50, num_hidden_layers=3, num_attention_heads=3, image_size=SIDE,
        crop_size=SIDE, patch_size=PATCH, image_token_id=ids["<|endoftext10|>"],
    )  # fmt: skip
    audio = Phi4MultimodalAudioConfig(
        hidden_size=32, intermediate_size=48, num_blocks=2, num_attention_heads=2, ext_pw_out_channel=32,
        depthwise_separable_out_channel=32, nemo_conv_channels=12, audio_token_id=ids["<|endoftext11|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    text = {**TEXT, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end}
    config = Phi4MultimodalConfig(
        **text, vision_config=vision, audio_config=audio, tie_word_embeddings=True
    )
    model = Phi4MultimodalForCausalLM(config).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    settings = {"size": {"height": SIDE, "width": SIDE}, "patch_size": PATCH, "dynamic_hd": 6}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    words = {"chat_template": _CHAT, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    shapes = {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.") and name.endswith("_proj.weight")
    }
    assert len(shapes) == 2 * 4
    found = {"": model}
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(folder / name, shapes, rank, seed, scale=1.0, base_model_name_or_path="phi-4")
        found[name] = merged(model, folder / name)
    return found


def merged(model: Any, adapter: Path) -> Any:
    """A copy with an adapter in its weights."""
    made = copy.deepcopy(model)
    stated = json.loads((adapter / "adapter_config.json").read_text())
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = made.state_dict()
    for name, down in factors.items():
        if name.endswith(".lora_A.weight"):
            up = factors[name.replace("lora_A", "lora_B")]
            own = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[own] += stated["lora_alpha"] / stated["r"] * up @ down
    return made


def library_inputs(media: Sequence[Any]) -> dict[str, Any]:
    """What headrace's processor made, as the library takes it; recordings must be of one length."""
    arrays = [
        {
            name: torch.tensor(np.frombuffer(x.data, x.dtype).reshape(x.shape))
            for name, x in one.inputs.items()
        }
        for one in media
    ]
    images = [one for one in arrays if "pixel_values" in one]
    clips = [one["input_features"] for one in arrays if "input_features" in one]
    found: dict[str, Any] = {}
    if clips:
        found["audio_input_features"] = torch.stack(clips)
        found["audio_embed_sizes"] = torch.tensor([-(-len(one) // 8) for one in clips])
    if images:
        most, side = max(len(one["pixel_values"]) for one in images), SIDE // PATCH
        pixels, masks, sizes = [], [], []
        for one in images:
            (rows, columns), (height, width) = (
                one[name].tolist() for name in ("image_grid", "image_patches")
            )
            mask = torch.zeros(rows * side, columns * side)
            mask[:height, :width] = 1
            cut = mask.view(rows, side, columns, side).transpose(1, 2).flatten(0, 1)
            more = most - len(one["pixel_values"])
            pixels.append(torch.cat([one["pixel_values"], torch.zeros(more, 3, SIDE, SIDE)]))
            masks.append(torch.cat([torch.ones(1, side, side), cut, torch.ones(more, side, side)]))
            sizes.append([rows * SIDE, columns * SIDE])
        found |= {
            "image_pixel_values": torch.stack(pixels), "image_attention_mask": torch.stack(masks),
            "image_sizes": torch.tensor(sizes),
        }  # fmt: skip
    return found
