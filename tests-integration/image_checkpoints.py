"""Tiny vision-language checkpoints with random weights, made by transformers, and pictures for them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from speech_checkpoints import save_tokenizer

from headrace_testing.model.decoders import randomise
from headrace_testing.model.plain.minicpmv import PlainMiniCPMV
from headrace_testing.model.plain.phi3v import PlainPhi3V
from headrace_testing.model.published_internvl import publish

CHAT = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "MARK{% elif part.type == 'video' %}FILM{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}assistant:"
)
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip

QWEN_MARKS = ("<|endoftext|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""The end of a text, and what stands for an image."""


def picture(seed: int, height: int = 40, width: int = 56) -> Image.Image:
    """Coloured noise over a slope."""
    draw = np.random.default_rng(seed)
    slope = np.linspace(0, 200, width)[None, :, None] * draw.uniform(0.2, 1, (1, 1, 3))
    noise = draw.integers(0, 55, (height, width, 3))
    return Image.fromarray((slope + noise).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


def finish(folder: Path, model: Any, mark: str, end: int, film: str = "") -> Any:
    """Save a model of random weights, with a chat template that marks images and videos so."""
    model = model.eval()
    randomise(model)
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = end
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": CHAT.replace("MARK", mark).replace("FILM", film),
                "eos_token": "<|endoftext|>",
            }
        )
    )
    return model


def save_llava(folder: Path) -> Any:
    """CLIP in front of a Llama; images of 28 x 28, 16 tokens each. Returns the model that is the oracle."""
    from transformers import (
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>"))
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    text = {**TEXT, "model_type": "llama", "eos_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=ids["<image>"],
        pad_token_id=end, eos_token_id=end,
    )  # fmt: skip
    CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(folder)
    return finish(folder, LlavaForConditionalGeneration(config), "<image>", end)


def _with_qwen_processor(folder: Path, model: Any, ids: Mapping[str, int]) -> Any:
    """Patches of 8 x 8 pixels, four of which are a token."""
    from transformers import Qwen2VLImageProcessor

    Qwen2VLImageProcessor(
        patch_size=8,
        merge_size=2,
        size={"shortest_edge": 16 * 16 * 4, "longest_edge": 16 * 16 * 30},
    ).save_pretrained(folder)
    return finish(folder, model, "".join(QWEN_MARKS[1:]), ids[QWEN_MARKS[0]])


def save_qwen2_vl(folder: Path, *, tower_heads: int = 2, **changes: Any) -> Any:
    """Images of their own size, a token for every 16 x 16 pixels; ``changes`` of the text's config."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    ids = save_tokenizer(folder, QWEN_MARKS)
    end = ids["<|endoftext|>"]
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": tower_heads, "mlp_ratio": 2,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope, "eos_token_id": end, "bos_token_id": None, **changes}
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        vision_config=vision, text_config=text, image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return _with_qwen_processor(folder, Qwen2VLForConditionalGeneration(config), ids)


def save_qwen3_vl(folder: Path) -> Any:
    """As :func:`save_qwen2_vl`; inner features of the tower go to the decoder's first layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = save_tokenizer(folder, QWEN_MARKS)
    end = ids["<|endoftext|>"]
    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 40,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    rope = {
        "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0,
        "mrope_interleaved": True,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "rope_parameters": rope, "eos_token_id": end, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        vision_config=vision, text_config=text, image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return _with_qwen_processor(folder, Qwen3VLForConditionalGeneration(config), ids)


def save_qwen3_5(folder: Path) -> Any:
    """As :func:`save_qwen2_vl`, in front of a decoder of a delta net and a layer of attention."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    ids = save_tokenizer(folder, QWEN_MARKS)
    end = ids["<|endoftext|>"]
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 40,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 25,
    }  # fmt: skip
    rope = {
        "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0,
        "mrope_interleaved": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "rope_parameters": rope, "eos_token_id": end, "bos_token_id": None,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3_5Config(
        vision_config=vision, text_config=text, image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    return _with_qwen_processor(folder, Qwen3_5ForConditionalGeneration(config), ids)


def save_pixtral(folder: Path) -> Any:
    """Images of their own size in rows of 8 x 8 pixels, whose ends take no vector."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    names = ("<|endoftext|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 64, "patch_size": 8,
    }  # fmt: skip
    text = {**TEXT, "model_type": "mistral", "eos_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=ids["[IMG]"],
        vision_feature_layer=-1, vision_feature_select_strategy="full",
        pad_token_id=end, eos_token_id=end,
    )  # fmt: skip
    pixtral_images(size={"longest_edge": 64}, patch_size=8).save_pretrained(folder)
    return finish(folder, LlavaForConditionalGeneration(config), "[IMG]", end)


def save_gemma3(folder: Path) -> Any:
    """Images of 4 tokens that all see each other, in front of a decoder with a window."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = ("<|endoftext|>", "<start_of_image>", "<image_soft_token>", "<end_of_image>")
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": end,
        "bos_token_id": None, "pad_token_id": end, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=4,
        tie_word_embeddings=False, boi_token_index=ids[names[1]], image_token_index=ids[names[2]],
        eoi_token_index=ids[names[3]],
    )  # fmt: skip
    Gemma3ImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)
    return finish(folder, Gemma3ForConditionalGeneration(config), names[1], end)


def save_gemma4(folder: Path, *, whole: bool = False) -> Any:
    """Images of up to 70 tokens. ``whole``: which in windows see each other; else layers have own inputs."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    names = ("<|endoftext|>", "<|image|>", "<|video|>", "<|image>", "<image|>", "<|audio|>")
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    vision = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
        "position_embedding_size": 160,
    }  # fmt: skip
    kind = {"use_bidirectional_attention": "vision"} if whole else {"num_kv_shared_layers": 2}
    text = {
        **TEXT, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 80,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "eos_token_id": end,
        "vocab_size_per_layer_input": TEXT["vocab_size"], "bos_token_id": None, "pad_token_id": end,
        "hidden_size_per_layer_input": 0 if whole else 8, "tie_word_embeddings": False, **kind,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Gemma4Config(
        vision_config=vision, text_config=text, audio_config=None, image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"], boi_token_id=ids["<|image>"], eoi_token_id=ids["<image|>"],
        audio_token_id=ids["<|audio|>"], tie_word_embeddings=False,
    )  # fmt: skip
    Gemma4ImageProcessorPil(
        patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
    ).save_pretrained(folder)
    return finish(folder, Gemma4ForConditionalGeneration(config), "<|image|>", end)


def save_paligemma(folder: Path) -> Any:
    """Images of 16 tokens in front of a text; all of a prompt sees all of it."""
    from transformers import (
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        SiglipImageProcessor,
    )

    ids = save_tokenizer(folder, ("<|endoftext|>", "<bos>", "<image>"))
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
        "projection_dim": 64,
    }  # fmt: skip
    text = {
        **TEXT, "model_type": "gemma", "head_dim": 16, "eos_token_id": end, "bos_token_id": ids["<bos>"],
        "pad_token_id": end, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=ids["<image>"], projection_dim=64,
        hidden_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    return finish(folder, PaliGemmaForConditionalGeneration(config), "<image>", end)


def save_internvl_chat(folder: Path) -> Any:
    """As InternVL is published: tiles of 16 x 16 pixels, 4 tokens each; returns transformers' class of it."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    names = ("<|endoftext|>", "<img>", "</img>", "<IMG_CONTEXT>")
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    vision = {
        "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True,
    }  # fmt: skip
    text = {**TEXT, "model_type": "qwen2", "eos_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    config = InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=ids[names[3]], tie_word_embeddings=False,
    )  # fmt: skip
    model = finish(folder, InternVLForConditionalGeneration(config), names[3], end)
    publish(folder)
    return model


def save_llama4(folder: Path) -> Any:
    """Tiles of 16 x 16 pixels, 4 tokens each, in front of a decoder of mixtures with chunks."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    names = (
        "<|endoftext|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>",
        "<|tile_x_separator|>", "<|tile_y_separator|>",
    )  # fmt: skip
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4, "projector_input_dim": 40, "projector_output_dim": 40,
        "vision_output_dim": 40,
    }  # fmt: skip
    text = {
        **TEXT, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
        "no_rope_layers": [1, 0], "attention_chunk_size": 24, "interleave_moe_layer_step": 2,
        "eos_token_id": end, "bos_token_id": None, "pad_token_id": end,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Llama4Config(
        vision_config=vision, text_config=text, image_token_index=ids["<|patch|>"],
        boi_token_index=ids["<|image_start|>"], eoi_token_index=ids["<|image_end|>"],
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 16, "width": 16}, "max_patches": 4})
    )
    return finish(folder, Llama4ForConditionalGeneration(config), "<|image|>", end)


def save_minicpmv(folder: Path) -> Any:
    """Slices of about 32 x 32 pixels, 5 tokens each, behind the number of their image."""
    names = (
        "<|endoftext|>", "<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
    )  # fmt: skip
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "siglip", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 3, "image_size": 56, "patch_size": 8,
    }  # fmt: skip
    config = {
        **TEXT, "hidden_size": 128, "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 2.6,
        "vision_config": vision, "query_num": 5, "drop_vision_last_layer": False, "image_token": ids["<unk>"],
        "tie_word_embeddings": False, "eos_token_id": end, "bos_token_id": None, "pad_token_id": end,
    }  # fmt: skip
    settings = {
        "patch_size": 8,
        "scale_resolution": 32,
        "max_slice_nums": 4,
        "image_feature_size": 5,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    return finish(folder, PlainMiniCPMV(config), "<unk>", end)


def save_phi3v(folder: Path) -> Any:
    """Two tiles of 16 x 16 pixels and the whole in one; 4 tokens each, ends of rows, and one between."""
    ids = save_tokenizer(folder, ("<|endoftext|>", "<|image|>"))
    end = ids["<|endoftext|>"]
    tower = {
        "name": "clip_vision_model", "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "image_dim_out": 32,
    }  # fmt: skip
    joins = {
        "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
        "use_hd_transform": True, "with_learnable_separator": True,
    }  # fmt: skip
    rope = {"type": "su", "short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
    config = {
        **TEXT, "architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": rope,
        "original_max_position_embeddings": 512, "img_processor": tower, "embd_layer": joins,
        "image_token": ids["<|image|>"], "tie_word_embeddings": False, "eos_token_id": end,
        "bos_token_id": None, "pad_token_id": end,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({"num_crops": 2}))
    torch.manual_seed(0)
    return finish(folder, PlainPhi3V(config), "<|image|>", end)


def save_lfm2_vl(folder: Path) -> Any:
    """A token for every 8 x 8 pixels, up to 12, or tiles of 16 x 16; in front of a recurrent decoder."""
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    names = ["<|endoftext|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    names += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    ids = save_tokenizer(folder, tuple(names))
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "siglip2_vision_model", "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 4, "num_patches": 25,
        "vision_use_head": False,
    }  # fmt: skip
    text = {
        **TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "eos_token_id": end,
        "bos_token_id": None, "pad_token_id": end, "block_multiple_of": 8, "vocab_size": 334,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Lfm2VlConfig(
        vision_config=vision, text_config=text, image_token_id=ids["<image>"],
        projector_hidden_size=40,
    )  # fmt: skip
    settings = {
        "encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 4, "max_image_tokens": 12,
        "max_tiles": 4,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return finish(folder, Lfm2VlForConditionalGeneration(config), "<image>", end)


def save_ovis2(folder: Path) -> Any:
    """Tiles of 16 x 16 pixels, 4 words each, between marks that take vectors as well."""
    from transformers import Ovis2Config, Ovis2ForConditionalGeneration
    from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>", "<IMG_ATOM>", *marks))
    end = ids["<|endoftext|>"]
    vision = {
        "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4, "hidden_stride": 2, "vocab_size": 40,
    }  # fmt: skip
    text = {**TEXT, "model_type": "qwen2", "eos_token_id": end, "bos_token_id": None}
    torch.manual_seed(0)
    config = Ovis2Config(
        vision_config=vision, text_config=text, vocab_size=TEXT["vocab_size"],
        hidden_size=TEXT["hidden_size"], image_token_id=ids["<IMG_ATOM>"],
        visual_indicator_token_ids=[ids[mark] for mark in marks], tie_word_embeddings=False,
    )  # fmt: skip
    Ovis2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4
    ).save_pretrained(folder)
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}')
    return finish(folder, Ovis2ForConditionalGeneration(config), "<image>", end)


def pixtral_images(**settings: Any) -> Any:
    """The library's image processor on Pillow."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(**settings)
