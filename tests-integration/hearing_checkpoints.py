"""Tiny checkpoints of models that take recordings, with random weights; each saver returns what goes on by
greedy tokens of transformers' model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from speech_checkpoints import RATE, SECONDS, save_tokenizer
from torch import Tensor

from headrace_core.multimodal import ProcessedMedia
from headrace_testing.model.decoders import randomise
from headrace_testing.model.plain.midashenglm import PlainMiDashengLM
from headrace_testing.model.plain.minicpmo import PlainMiniCPMO
from headrace_testing.model.plain.mobilenet_v5 import gemma3n_sees, tame
from headrace_testing.model.plain.ultravox import PlainUltravox, projector, tower

Oracle = Callable[[Sequence[int], Sequence[ProcessedMedia]], list[int]]
"""(tokens of a prompt, its items) -> eight tokens that follow."""
TEXT: dict[str, Any] = {
    "vocab_size": 312, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_SILENT = "<|endoftext|>"


def tensor(item: ProcessedMedia, name: str) -> Tensor:
    packed = item.inputs[name]
    return torch.from_numpy(np.frombuffer(packed.data, packed.dtype).reshape(packed.shape).copy())


def _written(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def _made(model: Any, folder: Path) -> Any:
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def _goes_on(model: Any, ids: Sequence[int], **given: Any) -> list[int]:
    tokens = torch.tensor([ids])
    given.setdefault("input_ids", tokens)
    with torch.inference_mode():
        out = model.generate(
            attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=8,
            min_new_tokens=8, **given,
        )  # fmt: skip
    found: list[int] = out[0, -8:].tolist()
    return found


def save_fun_asr_nano(folder: Path) -> Oracle:
    from transformers import FunAsrNanoConfig, FunAsrNanoForConditionalGeneration

    special = (_SILENT, "<|im_start|>", "<|im_end|>", "<|object_ref_start|>")
    mark = save_tokenizer(folder, special)["<|object_ref_start|>"]
    encoder = {
        "model_type": "fun_asr_nano_encoder", "num_mel_bins": 80, "num_stacked_frames": 7,
        "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20, "num_hidden_layers": 4,
        "num_timestamp_prediction_layers": 2, "fsmn_kernel_size": 4, "max_position_embeddings": 200,
    }  # fmt: skip
    adaptor = {
        "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 12, "num_hidden_layers": 2,
        "projector_hidden_size": 24,
    }  # fmt: skip
    config = FunAsrNanoConfig(
        audio_config=encoder, adaptor_config=adaptor, text_config={**TEXT, "model_type": "qwen3"},
        audio_token_id=mark,
    )  # fmt: skip
    torch.manual_seed(0)
    model = _made(FunAsrNanoForConditionalGeneration(config).eval(), folder)
    _written(folder, "preprocessor_config.json", {})

    def goes_on(ids: Sequence[int], media: Sequence[ProcessedMedia]) -> list[int]:
        [item] = media
        frames = tensor(item, "input_features")[None]
        mask = torch.ones(frames.shape[:2], dtype=torch.long)
        return _goes_on(model, ids, input_features=frames, input_features_mask=mask)

    return goes_on


def save_music_flamingo(folder: Path) -> Oracle:
    """Pieces of two seconds."""
    from transformers import (
        MusicFlamingoConfig,
        MusicFlamingoForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    ids = save_tokenizer(folder, (_SILENT, "<sound>", "<|sound_bos|>", "<|sound_eos|>"))
    audio = {
        "model_type": "audioflamingo3_encoder", "num_mel_bins": 16, "hidden_size": 16,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_source_positions": SECONDS * 50,
    }  # fmt: skip
    config = MusicFlamingoConfig(
        audio_config=audio, text_config={**TEXT, "model_type": "qwen2"}, audio_token_id=ids["<sound>"],
        audio_bos_token_id=ids["<|sound_bos|>"], audio_eos_token_id=ids["<|sound_eos|>"],
        rope_parameters={"rope_type": "default", "rope_theta": 50, "partial_rotary_factor": 0.4},
    )  # fmt: skip
    torch.manual_seed(0)
    model = _made(MusicFlamingoForConditionalGeneration(config).eval(), folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(folder)

    def goes_on(ids: Sequence[int], media: Sequence[ProcessedMedia]) -> list[int]:
        pieces = torch.cat([tensor(item, "input_features") for item in media])
        piece, lengths = pieces.shape[1], list[int]()
        for item in media:
            left = int(tensor(item, "num_frames"))
            lengths += [min(piece, left - begin) for begin in range(0, left, piece)]
        mask = torch.arange(piece)[None] < torch.tensor(lengths)[:, None]
        given = {"input_features": pieces.transpose(1, 2), "input_features_mask": mask.long()}
        return _goes_on(model, ids, **given)

    return goes_on


def save_ultravox(folder: Path) -> Oracle:
    """Windows of two seconds; the language model is in a folder of its own."""
    from transformers import LlamaConfig, WhisperConfig

    mark = "<|reserved_special_token_0|>"
    ids = save_tokenizer(folder, (_SILENT, mark))
    audio = {
        "vocab_size": 60, "num_mel_bins": 16, "d_model": 12, "encoder_layers": 2,
        "encoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_layers": 1,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 20, "max_source_positions": SECONDS * 50,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = PlainUltravox(WhisperConfig(**audio), LlamaConfig(**TEXT), 3, False).eval()
    randomise(model)
    own = _made(model.language_model, folder / "language")
    save_file(tower(model) | projector(model), folder / "model.safetensors")
    whole = {
        "architectures": ["UltravoxModel"], "model_type": "ultravox", "hidden_size": 20,
        "stack_factor": 3, "projector_ln_mid": True, "audio_model_id": None,
        "audio_config": {**audio, "model_type": "whisper"}, "text_model_id": str(folder / "language"),
    }  # fmt: skip
    _written(folder, "config.json", whole)
    _written(folder, "preprocessor_config.json", {"feature_size": 16, "chunk_length": SECONDS})

    def goes_on(ids_: Sequence[int], media: Sequence[ProcessedMedia]) -> list[int]:
        vectors = model.get_input_embeddings()(torch.tensor([ids_])).detach()
        with torch.inference_mode():
            heard = torch.cat([model.heard(tensor(item, "input_features")) for item in media])
        vectors[torch.tensor([ids_]) == ids[mark]] = heard
        return _goes_on(own, ids_, inputs_embeds=vectors, input_ids=None)

    return goes_on


def save_midashenglm(folder: Path) -> Oracle:
    """States of 40 ms, runs of 1.28 s."""
    ids = save_tokenizer(folder, (_SILENT, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"))
    encoder = {
        "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0, "n_mels": 16, "patch_size": [16, 4],
        "patch_stride": [16, 4], "target_length": 128, "init_values": None,
    }  # fmt: skip
    text = {k: v for k, v in TEXT.items() if k != "head_dim"}
    text |= {"model_type": "qwen2_5_omni_text", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    config = {
        "architectures": ["MiDashengLMModel"], "model_type": "midashenglm", "subsample_factor": 5,
        "audio_encoder_config": encoder, "text_config": text, "image_token": ids["<|AUDIO|>"],
        "audio_token_id": ids["<|AUDIO|>"],
    }  # fmt: skip
    torch.manual_seed(0)
    model = _made(PlainMiDashengLM(config).eval(), folder)

    def goes_on(ids_: Sequence[int], media: Sequence[ProcessedMedia]) -> list[int]:
        names = ("input_features", "num_heard")
        return _goes_on(
            model, ids_, images=[{name: tensor(item, name) for name in names} for item in media]
        )

    return goes_on


MINICPMO_TOKENS = (
    "<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|audio_start|>",
    "<|audio_end|>",
)  # fmt: skip


def save_minicpmo(folder: Path) -> Oracle:
    """Pieces of 2 s, 25 vectors a second between two tokens; slices of about 32 x 32 pixels, 5 tokens
    each."""
    ids = save_tokenizer(folder, (_SILENT, *MINICPMO_TOKENS))
    vision = {
        "model_type": "siglip", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 3, "image_size": 56, "patch_size": 8,
    }  # fmt: skip
    audio = {
        "num_mel_bins": 16, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 96, "max_source_positions": SECONDS * 50,
    }  # fmt: skip
    text = {k: v for k, v in TEXT.items() if k != "head_dim"}
    config = {
        **text, "hidden_size": 128, "architectures": ["MiniCPMO"], "model_type": "minicpmo", "version": "2.6",
        "vision_config": vision, "query_num": 5, "drop_vision_last_layer": False, "audio_config": audio,
        "audio_pool_step": 2, "audio_chunk_length": 1.0, "image_token": ids["<unk>"],
        "tie_word_embeddings": False,
    }  # fmt: skip
    settings = {
        "patch_size": 8, "scale_resolution": 32, "max_slice_nums": 4, "image_feature_size": 5,
        "feature_size": 16, "chunk_length": SECONDS, "sampling_rate": RATE,
    }  # fmt: skip
    _written(folder, "preprocessor_config.json", settings)
    torch.manual_seed(0)
    model = _made(PlainMiniCPMO(config).eval(), folder)

    def goes_on(ids_: Sequence[int], media: Sequence[ProcessedMedia]) -> list[int]:
        return _goes_on(
            model,
            ids_,
            images=[{name: tensor(item, name) for name in item.inputs} for item in media],
        )

    return goes_on


def save_gemma3n(folder: Path, table: Any) -> Oracle:
    """Images of 96 pixels of a side in four places, recordings in forty.

    Args:
        table: of the tower for images.
    """
    from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration

    names = tuple(f"<{kind}_{name}>" for kind in ("image", "audio") for name in ("begin", "end"))
    marks = ("<image_soft_token>", "<audio_soft_token>")
    special = (_SILENT, "<start_of_turn>", "<end_of_turn>", *names, *marks)
    ids = save_tokenizer(folder, special)
    image, sound = (ids[mark] for mark in marks)
    text = {
        **TEXT, "vocab_size": sound + 4, "vocab_size_per_layer_input": image, "num_hidden_layers": 3,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "laurel_rank": 4,
        "sliding_window": 9, "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }  # fmt: skip
    audio = {
        "vocab_size": 4, "vocab_offset": sound, "hidden_size": 16, "conf_attention_chunk_size": 4,
        "conf_attention_context_left": 4, "conf_attention_context_right": 1,
        "conf_num_attention_heads": 2, "conf_num_hidden_layers": 2, "sscp_conv_channel_size": [6, 4],
    }  # fmt: skip
    vision = {"vocab_size": 1, "vocab_offset": image, "hidden_size": 12, "architecture": "tiny"}
    config = Gemma3nConfig(
        audio_config=audio, vision_config=vision, text_config=text, image_token_id=image,
        audio_token_id=sound, audio_soft_tokens_per_image=40, vision_soft_tokens_per_image=4,
        boi_token_id=ids[names[0]], eoi_token_id=ids[names[1]], boa_token_id=ids[names[2]],
        eoa_token_id=ids[names[3]],
    )  # fmt: skip
    torch.manual_seed(0)
    with gemma3n_sees(table, 12, 2):
        model = Gemma3nForConditionalGeneration(config).eval()
    randomise(model)
    tame(model.model.vision_tower)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    settings = {
        "size": {"height": 96, "width": 96}, "do_normalize": False, "resample": 2,
        "sampling_rate": RATE,
    }  # fmt: skip
    _written(folder, "preprocessor_config.json", settings)

    def goes_on(ids: Sequence[int], media: Sequence[ProcessedMedia]) -> list[int]:
        pixels = [tensor(item, "pixel_values") for item in media if "pixel_values" in item.inputs]
        [frames] = [
            tensor(item, "input_features") for item in media if "input_features" in item.inputs
        ]
        return _goes_on(
            model, ids, pixel_values=torch.stack(pixels), input_features=frames[None],
            input_features_mask=torch.ones(1, len(frames), dtype=torch.bool),
        )  # fmt: skip

    return goes_on


def save_gemma4(folder: Path) -> Oracle:
    """Images of up to 70 tokens, recordings of eight bins; the first layers have inputs of their own."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    special = (_SILENT, *(f"<|{kind}{end}" for kind in ("image", "audio") for end in (">", "|>")))
    ids = save_tokenizer(folder, (*special, "<image|>", "<audio|>"))
    text = {
        **TEXT, "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 60,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1, "vocab_size_per_layer_input": TEXT["vocab_size"],
        "hidden_size_per_layer_input": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 2,
        "position_embedding_size": 160,
    }  # fmt: skip
    audio = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "attention_chunk_size": 4,
        "attention_context_left": 5, "subsampling_conv_channels": [8, 6], "output_proj_dims": 20,
    }  # fmt: skip
    config = Gemma4Config(
        audio_config=audio, vision_config=vision, text_config=text, tie_word_embeddings=False,
        image_token_id=ids["<|image|>"], boi_token_id=ids["<|image>"], eoi_token_id=ids["<image|>"],
        audio_token_id=ids["<|audio|>"], boa_token_id=ids["<|audio>"], eoa_token_index=ids["<audio|>"],
    )  # fmt: skip
    Gemma4ImageProcessorPil(
        patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
    ).save_pretrained(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    _written(folder, "preprocessor_config.json", {**settings, "feature_size": 8})
    torch.manual_seed(0)
    model = _made(Gemma4ForConditionalGeneration(config).eval(), folder)

    def goes_on(ids: Sequence[int], media: Sequence[ProcessedMedia]) -> list[int]:
        [frames] = [
            tensor(item, "input_features") for item in media if "input_features" in item.inputs
        ]
        [image] = [item for item in media if "pixel_values" in item.inputs]
        rows, columns = tensor(image, "grids").view(2).tolist()
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return _goes_on(
            model, ids, pixel_values=tensor(image, "pixel_values")[None],
            image_position_ids=places[None], input_features=frames[None],
            input_features_mask=torch.ones(1, len(frames), dtype=torch.bool),
        )  # fmt: skip

    return goes_on
