"""Tiny checkpoints, mostly of models that no library has, by the plain readings of them, and images as those
take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from image_checkpoints import TEXT, finish
from speech_checkpoints import save_tokenizer

from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for
from headrace_testing.model.plain.bagel import PlainBagel
from headrace_testing.model.plain.hcx_vision import PlainHCXVision
from headrace_testing.model.plain.isaac import PlainIsaac
from headrace_testing.model.plain.kanana_v import PlainKananaV
from headrace_testing.model.plain.llava_kin import ENDS, PlainMiniMaxVL01, PlainTarsier
from headrace_testing.model.plain.minicpmv import PlainMiniCPMV
from headrace_testing.model.plain.step import PlainStep3VL, PlainStepVL
from headrace_testing.model.published_molmo2 import published_molmo2

CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
}  # fmt: skip
PINPOINTS = [[28, 28], [28, 56], [56, 28]]


def save_tarsier(folder: Path) -> Any:
    """CLIP in front of a Llama; images of 28 x 28, 4 rows of 4 tokens and an end."""
    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>", "<row>", "<end>"))
    end = ids["<|endoftext|>"]
    config = {
        "architectures": ["TarsierForConditionalGeneration"], "model_type": "llava", "vision_config": CLIP,
        "text_config": {**TEXT, "model_type": "llama", "eos_token_id": end, "bos_token_id": None},
        "image_token": ids["<image>"], "image_token_index": ids["<image>"], "pad_token_id": end,
        **{key: ids[name] for key, name in zip(ENDS, ("<row>", "<end>"), strict=True)},
    }  # fmt: skip
    settings = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    return finish(folder, PlainTarsier(config), "<image>", end)


def save_minimax_vl(folder: Path) -> Any:
    """Tiles of 28 x 28, 16 tokens each, in front of lightning attention and attention."""
    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>"))
    end = ids["<|endoftext|>"]
    text = {
        **TEXT, "model_type": "minimax", "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16, "hidden_act": "silu", "block_size": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "eos_token_id": end, "bos_token_id": None,
    }  # fmt: skip
    config = {
        "architectures": ["MiniMaxVL01ForConditionalGeneration"], "model_type": "minimax_vl_01",
        "vision_config": CLIP, "text_config": text, "image_token": ids["<image>"],
        "image_token_index": ids["<image>"], "image_grid_pinpoints": PINPOINTS, "pad_token_id": end,
    }  # fmt: skip
    settings = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    return finish(folder, PlainMiniMaxVL01(config), "<image>", end)


def save_kanana_v(folder: Path) -> Any:
    """Images of their own size, a token for every 8 x 8 pixels, and line ends."""
    ids = save_tokenizer(folder, ("<|endoftext|>", "<|reserved|>", "<image>"))
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "kanana-1.5-v-visual-encoder", "depth": 2, "embed_dim": 32, "hidden_size": 32,
        "num_heads": 2, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }  # fmt: skip
    projector = {
        "model_type": "kanana-1.5-v-visual_projector", "projector_type": "dynamic-c-abs", "depth": 2,
        "encoder_hidden_size": 32, "hidden_size": 20, "output_hidden_size": TEXT["hidden_size"],
        "merge_size": 2, "mlp_depth": 2, "num_eos_tokens": 0, "pos_emb": True, "pos_emb_size": 36,
        "prenorm": False, "feature_layer_index": -1,
    }  # fmt: skip
    text = {
        **TEXT, "model_type": "kanana-1.5-3b-instruct", "eos_token_id": end, "bos_token_id": None,
        "pad_token_id": end,
    }  # fmt: skip
    config = {
        "architectures": ["KananaVForConditionalGeneration"], "model_type": "kanana-1.5-v",
        "vision_config": vision, "projector_config": projector, "text_config": text,
        "image_token": ids["<|reserved|>"], "pad_token_id": end,
    }  # fmt: skip
    settings = {"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 1600}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    return finish(folder, PlainKananaV(config), "<image>", end)


def save_hcx_vision(folder: Path) -> Any:
    """Tiles of 28 x 28, 9 tokens each, which stages of RegNet make of SigLIP's states."""
    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>"))
    end = ids["<|endoftext|>"]
    config = {
        "architectures": ["HCXVisionForCausalLM"], "model_type": "hyperclovax_vlm",
        "vision_config": {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": {**TEXT, "model_type": "llama", "eos_token_id": end, "bos_token_id": None},
        "image_token": ids["<image>"], "image_token_id": ids["<image>"], "pad_token_id": end,
        "num_queries_vis_abstractor_image": 9, "mm_projector_type": "cabstractor", "use_nth_layer": -2,
        "possible_resolutions": PINPOINTS, "anyres": True, "unpad": True, "proj_pos_emb": True,
        "proj_prenorm": False,
    }  # fmt: skip
    settings = {
        "anyres": True, "unpad": True, "possible_resolutions": PINPOINTS, "patch_size": 7,
        "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    return finish(folder, PlainHCXVision(config), "<image>", end)


MOLMO2_MARKS = ("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>",
                "<frame_end>")  # fmt: skip


def save_molmo2(folder: Path) -> Any:
    """Crops of 28 x 28 that overlap, in front of Qwen 3; all images of a prompt see each other."""
    from transformers import Molmo2Config

    names = ("<|endoftext|>", "<|image|>", "<|video|>", *MOLMO2_MARKS)
    ids = save_tokenizer(folder, names)
    end = ids["<|endoftext|>"]
    tower = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}
    vision = {**tower, "intermediate_size": 36, "num_hidden_layers": 3, "image_size": [28, 28],
              "patch_size": 7}  # fmt: skip
    adapter = {**tower, "vision_feature_layer": [2, 0], "intermediate_size": 40,
               "text_hidden_size": TEXT["hidden_size"]}  # fmt: skip
    answers = min(ids.values())
    text = {**TEXT, "vocab_size": answers, "additional_vocab_size": TEXT["vocab_size"] - answers,
            "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}  # fmt: skip
    config = Molmo2Config(
        text_config=text, vision_config=vision, adapter_config=adapter, image_patch_id=ids["<im_patch>"],
        bos_token_id=None, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    settings = {
        "size": {"height": 28, "width": 28}, "patch_size": 7, "max_crops": 2, "overlap_margins": [1, 1],
        "pooling_size": [2, 2],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = published_molmo2()(config)
    model.marks = [ids[name] for name in MOLMO2_MARKS]
    return finish(folder, model, "<|image|>", end)


STEP_MARKS = (
    "<im_patch>",
    "<patch_start>",
    "<patch_end>",
    "<patch_newline>",
    "<im_start>",
    "<im_end>",
)
STEP_IMAGES = {"size": {"height": 32, "width": 32}, "patch_size": 24, "max_image_size": 128}


def save_step_vl(folder: Path) -> Any:
    """The whole and crops, 4 tokens each, in front of Qwen 3."""
    ids = save_tokenizer(folder, ("<|endoftext|>", *STEP_MARKS))
    end, image = ids["<|endoftext|>"], ids["<im_patch>"]
    vision = {
        "width": 24,
        "layers": 2,
        "heads": 2,
        "mlp_ratio": 2.0,
        "image_size": 32,
        "patch_size": 4,
    }
    text = {**TEXT, "model_type": "qwen3", "head_dim": 16, "hidden_act": "silu", "eos_token_id": end,
            "bos_token_id": None, "pad_token_id": end}  # fmt: skip
    config = {
        "architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics",
        "vision_config": vision, "text_config": text, "image_token": image, "image_token_id": image,
        "pad_token_id": end,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(STEP_IMAGES))
    torch.manual_seed(0)
    return finish(folder, PlainStepVL(config), "<im_patch>", end)


def save_step3_vl(folder: Path) -> Any:
    """The same in front of a dense layer and a mixture."""
    ids = save_tokenizer(folder, ("<|endoftext|>", *STEP_MARKS))
    end, image = ids["<|endoftext|>"], ids["<im_patch>"]
    vision = {
        "model_type": "step3_vision_encoder", "hidden_size": 24, "intermediate_size": 40,
        "output_hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 4,
    }  # fmt: skip
    text = {
        "model_type": "step3_text", "vocab_size": TEXT["vocab_size"], "hidden_size": 48,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_attention_groups": 1, "share_q_dim": 20, "max_position_embedding": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 500000, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 32,
        "share_expert_dim": 28, "moe_layers_enum": "1", "eos_token_id": end, "bos_token_id": None,
        "pad_token_id": end,
    }  # fmt: skip
    config = {
        "architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl",
        "vision_config": vision, "text_config": text, "understand_projector_stride": 2,
        "projector_bias": True, "image_token": image, "image_token_id": image, "pad_token_id": end,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(STEP_IMAGES))
    torch.manual_seed(0)
    return finish(folder, PlainStep3VL(config), "<im_patch>", end)


def save_isaac(folder: Path) -> Any:
    """Images of about their own size, a token for every 16 x 16 pixels, in front of Qwen 3."""
    ids = save_tokenizer(folder, ("<|endoftext|>", "<image>"))
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "pixel_shuffle_siglip2", "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "num_patches": 16,
        "pixel_shuffle_scale_factor": 2,
    }  # fmt: skip
    config = {
        **TEXT, "architectures": ["IsaacForConditionalGeneration"], "model_type": "isaac", "head_dim": 16,
        "hidden_act": "silu", "rope_theta": 10000.0, "vision_config": vision, "pixel_shuffle_scale": 2,
        "vision_max_num_patches": 96, "vision_token": "<image>", "image_token": ids["<image>"],
        "eos_token_id": end, "bos_token_id": None, "pad_token_id": end,
    }  # fmt: skip
    torch.manual_seed(0)
    return finish(folder, PlainIsaac(config), "<image>", end)


def save_bagel(folder: Path) -> Any:
    """Images of 8 x 8 patches at most, between two tokens, in front of Qwen 2."""
    marks = ("<|endoftext|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    ids = save_tokenizer(folder, marks)
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 4, "rope": False,
    }  # fmt: skip
    config = {
        "architectures": ["BagelForConditionalGeneration"], "model_type": "bagel",
        "llm_config": {**TEXT, "model_type": "qwen2", "hidden_act": "silu", "rope_theta": 10000.0,
                       "eos_token_id": end, "bos_token_id": None, "pad_token_id": end},
        "vit_config": vision, "visual_und": True, "interpolate_pos": False,
        "vit_max_num_patch_per_side": 8, "connector_act": "gelu_pytorch_tanh",
        "image_token": ids["<|image_pad|>"], "eos_token_id": end,
    }  # fmt: skip
    torch.manual_seed(0)
    return finish(folder, PlainBagel(config), "<|image_pad|>", end)


MINICPMV_MARKS = ("<unk>", "<image>", "</image>", "<slice>", "</slice>")


def save_minicpmv_2_5(folder: Path) -> Any:
    """Slices of about 32 x 32 pixels, 5 tokens each, of which none has a number; no version in the config."""
    ids = save_tokenizer(folder, ("<|endoftext|>", *MINICPMV_MARKS))
    end = ids["<|endoftext|>"]
    vision = {
        "model_type": "idefics2", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 3, "image_size": 56, "patch_size": 8,
    }  # fmt: skip
    config = {
        **TEXT, "hidden_size": 128, "architectures": ["MiniCPMV"], "model_type": "minicpmv",
        "vision_config": vision, "query_num": 5, "drop_vision_last_layer": False,
        "image_token": ids["<unk>"], "tie_word_embeddings": False, "eos_token_id": end,
        "bos_token_id": None, "pad_token_id": end,
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


EMU3_MARKS = {
    "image_token": "<image>", "boi_token": "<|image start|>", "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>", "eoi_token": "<|image end|>", "bos_token": "<|extra_203|>",
}  # fmt: skip


def save_emu3(folder: Path) -> Any:
    """Images of about their own size, of which eight codes for 8 x 8 pixels are tokens."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    pieces = tuple(f"<|visual token {code:06}|>" for code in range(8))
    ids = save_tokenizer(folder, ("<|endoftext|>", *EMU3_MARKS.values(), "<|extra_200|>", *pieces))
    end = ids["<|endoftext|>"]
    tower = {
        "codebook_size": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [3],
        "hidden_size": 32, "num_attention_heads": 1,
    }  # fmt: skip
    text = {**TEXT, "eos_token_id": end, "bos_token_id": ids["<|extra_203|>"], "pad_token_id": end}
    named = ("<image>", "<|extra_200|>", *pieces)
    config = Emu3Config(
        vq_config=tower, text_config=text, vocabulary_map={name: ids[name] for name in named},
    )  # fmt: skip
    settings = {"min_pixels": 1024, "max_pixels": 2048}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = finish(folder, Emu3ForConditionalGeneration(config), "<image>", end)
    model.generate = partial(_each_alone, model, model.generate)
    return model


@torch.inference_mode()
def _each_alone(
    model: Any, generate: Any, input_ids: Any, images: Sequence[Any] = (), **settings: Any
) -> Any:
    """What Emu3 of the library generates of images that are encoded by themselves, not filled up to one
    size."""
    ids, whole = input_ids.clone(), model.model
    found = []
    for image in images:
        pixels = image["pixel_values"]
        [codes] = whole.vqmodel.encode(pixels[None], [pixels.shape[1:]]).image_tokens
        found.append(whole.vocabulary_mapping.convert_img2bpe(codes).flatten().long())
    if found:
        ids[ids == whole.vocabulary_mapping.image_token_id] = torch.cat(found)
    made = generate(input_ids=ids, **settings)
    return torch.cat((input_ids, made[:, ids.shape[1] :]), dim=1)


KIN = {
    "bagel": save_bagel,
    "emu3": save_emu3,
    "tarsier": save_tarsier,
    "minicpmv_2_5": save_minicpmv_2_5,
    "minimax_vl": save_minimax_vl,
    "isaac": save_isaac,
    "kanana_v": save_kanana_v,
    "hcx_vision": save_hcx_vision,
    "molmo2": save_molmo2,
    "step3_vl": save_step3_vl,
    "step_vl": save_step_vl,
}
CACHE_GROUPS = {"minimax_vl": 2}
STEPS = {"bagel": 96, "molmo2": 96}
"""Tokens of the least step that some need: of images that are not cut."""


def mark_of(folder: Path) -> str:
    """How prompts of a checkpoint mark an image."""
    config = json.loads((folder / "config.json").read_text())
    marks = {
        "bagel": "<|image_pad|>",
        "minicpmv": "<unk>",
        "molmo2": "<|image|>",
        "step3_vl": "<im_patch>",
        "step_robotics": "<im_patch>",
    }
    return marks.get(config["model_type"], "<image>")


def by_own_processor(folder: Path, images: Sequence[Any]) -> dict[str, Any]:
    """Numbers and tokens by the processor that is served, which tests of its own compare with the published
    code; and the tokens that prompts with images begin with."""
    import numpy as np

    config = json.loads((folder / "config.json").read_text())
    processor = processor_for(config["architectures"][0], config, folder)
    given = [MediaItem("image", np.asarray(image), "", {}) for image in images]
    media = processor.process(given, {})
    made = [
        {
            name: torch.tensor(np.frombuffer(x.data, x.dtype).reshape(x.shape))
            for name, x in one.inputs.items()
        }
        for one in media
    ]
    [mark] = processor.placeholder_ids[:1]
    items = [list(one.token_ids) or [mark] * one.num_tokens for one in media]
    placed = processor.place([mark] * len(media), media)
    first = placed.token_ids[: placed.offsets[0]] if media else []
    return {"images": made, "items": items, "first": first}
