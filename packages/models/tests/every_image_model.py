"""Every model of transformers that answers about images, as a tiny checkpoint run by its backend."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import every_causal_lm
import torch
from every_causal_lm import SERVED, TOLERANCE, Outcome
from torch import Tensor
from vision_conformance import packed

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import HeadraceError
from headrace_core.model import INPUT_EMBEDS, MROPE_POSITIONS, InputEmbeds, SupportsMRoPE
from headrace_core.multimodal import MediaInput
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_models.transformers_backend.library import transformers
from headrace_testing.model.decoders import PagedDriver, build_context, randomise

TABLE = Path(__file__).parent / "transformers_image_models.json"
"""What came of each, as it is published."""
IMAGE = 120
"""Placeholder."""
SIDE = 28
LARGEST = 20_000_000
"""Parameters of a checkpoint that is made."""
TEXT_SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
VISION: dict[str, Any] = {
    **every_causal_lm.SMALL, "hidden_size": 32, "num_attention_heads": 2, "num_heads": 2,
    "num_key_value_heads": 2, "image_size": SIDE, "patch_size": 7, "depth": 2, "head_dim": 16,
    "embed_dim": 32, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
    "num_channels": 3, "in_channels": 3,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "image_size": SIDE,
    "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 7,
}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
LLAMA = {**TEXT_SIZES, "model_type": "llama"}
QWEN2 = {**TEXT_SIZES, "model_type": "qwen2"}
_AXES = {"text_config": {"rope_parameters": ROPE, "head_dim": 16}}
_GLM = {"text_config": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}, "head_dim": 16}}
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": SIDE, "patch_size": 7,
}  # fmt: skip
_ANYRES = {
    "vision_config": CLIP, "image_grid_pinpoints": [[28, 56], [56, 28]],
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "cosmos3_edge": _AXES,
    "qwen2_vl": {**_AXES, "vision_config": {"hidden_size": 64}},
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1,
        "resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2}},
    "qwen2_5_vl": _AXES, "paddleocr_vl": _AXES,
    "glm4v": _GLM, "glm46v": _GLM, "glm4v_moe": _GLM, "glm_ocr": _GLM, "glmga": _GLM,
    "hunyuan_vl": {"text_config": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "xdrope_section": [2, 2, 2, 2]}}},
    "cohere_compass": {"text_config": {"layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE)}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [24, 24], "rope_parameters": ROPE}},
    "fuyu": {"patch_size": 7},
    "fast_vlm": {"vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_t8",
        "do_pooling": True, "num_classes": 1, "model_args": {"inference_mode": True},
        "hidden_size": 768}},
    "perception_lm": {"projector_pooling_ratio": 2, "vision_use_cls_token": True,
        "vision_config": {"model_type": "timm_wrapper", "do_pooling": False, "num_classes": 1,
            "architecture": "vit_pe_core_tiny_patch16_384", "initializer_range": 0.02,
            "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": [SIDE, SIDE],
                "ref_feat_shape": [4, 4], "patch_size": 7, "global_pool": "", "init_values": 0.1,
                "use_post_transformer_norm": False}}},
    "inkling2": {"vision_config": {"text_hidden_size": 64, "posemb_grid_size": 8,
        "projection_hidden_dim": 48}},
    "molmo2": {"vision_config": {"image_size": [28, 28], "image_default_input_size": [28, 28],
        "image_num_pos": 16}, "image_patch_id": IMAGE,
        "adapter_config": {"vision_feature_layer": [0, 1], "hidden_size": 32, "text_hidden_size": 64,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}},
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 48,
        "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 2,
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "patch_temporal": 2,
            "merge_size": 2}},
    "llava_next": _ANYRES, "llava_next_video": _ANYRES,
    "llava_onevision": {**_ANYRES, "vision_config": SIGLIP},
    "mistral3": {"vision_config": _PIXTRAL}, "lighton_ocr": {"vision_config": _PIXTRAL},
    "vipllava": {"vision_feature_layer": [-1, -2]},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "janus": {"vision_config": {"num_image_tokens": 16, "projection_dim": 64, "mlp_ratio": 2},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
            "latent_channels": 32, "num_embeddings": 32, "embed_dim": 8, "projection_dim": 64}},
    "chameleon": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "resolution": SIDE,
        "num_res_blocks": 1, "latent_channels": 32, "num_embeddings": 16, "embed_dim": 8},
        "vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{a}{b}Z": 40 + 4 * i + j
            for i, a in enumerate("ABCD") for j, b in enumerate("ABCD")}}},
    "llama4": {"vision_config": {"vision_output_dim": 32, "intermediate_size": 128, "projector_input_dim": 32,
        "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5},
        "text_config": {"no_rope_layers": [1, 0], "attention_chunk_size": 8}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"model_type": "sam_vision_model",
        "image_size": 64, "patch_size": 16, "output_channels": 8, "num_pos_feats": 8, "window_size": 2,
        "global_attn_indexes": [0], "mlp_dim": 32, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2}},
    "exaone4_5": {"vision_config": {"fullatt_block_indexes": [1], "window_size": 28}},
    "kimi_k25": {"projection_hidden_size": 32, "text_config": {"num_key_value_heads": 4},
        "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 2}},
    "hyperclovax_vision_v2": {"vision_config": {"fullatt_block_indexes": [1], "window_size": 28}},
}  # fmt: skip
"""Values of a family's config beside the sizes that its names tell."""


def _grids(numbers: int = 294, **more: Tensor) -> list[dict[str, Tensor]]:
    """Patches as rows, and their numbers in time, height and width."""
    return [
        {
            "pixel_values": torch.randn(4 * width, numbers),
            "image_grid_thw": torch.tensor([[1, 4, width]]),
            **more,
        }
        for width in (4, 8)
    ]


def _patches() -> list[dict[str, Tensor]]:
    """Patches as pictures [n, 3, 7, 7]."""
    return [{**i, "pixel_values": i["pixel_values"].view(-1, 3, 7, 7)} for i in _grids(147)]


def _squares(*shape: int, **more: Tensor) -> list[dict[str, Tensor]]:
    return [{"pixel_values": torch.randn(*shape), **more} for _ in range(2)]


def _anyres() -> list[dict[str, Tensor]]:
    sizes = [[28, 56]], [[56, 20]]
    return [
        {"pixel_values": torch.randn(1, 3, 3, SIDE, SIDE), "image_sizes": torch.tensor(size)}
        for size in sizes
    ]


_TILES = (1, 2, 3, SIDE, SIDE)
INPUTS: dict[str, Any] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga", "exaone4_5",
         "hyperclovax_vision_v2", "minimax_m3_vl", "cohere_compass", "muse_glimmer"),
        _grids,
    ),
    "kimi_k25": _patches,
    "hunyuan_vl": lambda: _grids(147), "cosmos3_edge": lambda: _grids(147),
    "paddleocr_vl": _patches,
    "video_llama_3": lambda: _grids(147, image_merge_sizes=torch.tensor([2])),
    "fast_vlm": lambda: _squares(1, 3, 64, 64),
    "perception_lm": lambda: _squares(1, 1, 3, SIDE, SIDE),
    "fuyu": lambda: _squares(1, 6, 147),
    "llava_next": _anyres, "llava_next_video": _anyres, "llava_onevision": _anyres,
    "mistral3": lambda: _squares(1, 3, SIDE, SIDE, image_sizes=torch.tensor([[SIDE, SIDE]])),
    "lighton_ocr": lambda: _squares(1, 3, SIDE, SIDE, image_sizes=torch.tensor([[SIDE, SIDE]])),
    "idefics2": lambda: _squares(*_TILES), "idefics3": lambda: _squares(*_TILES),
    "smolvlm": lambda: _squares(*_TILES),
    "deepseek_vl_hybrid": lambda: _squares(
        1, 3, SIDE, SIDE, high_res_pixel_values=torch.randn(1, 3, 64, 64)),
    "lfm2_vl": lambda: _squares(1, 16, 147, spatial_shapes=torch.tensor([[4, 4]]),
        pixel_attention_mask=torch.ones(1, 16, dtype=torch.long)),
}  # fmt: skip
"""Makes a family's two images where they are not pixels [1, 3, SIDE, SIDE]."""
_BESIDE = {"idefics2": 1, "idefics3": 1, "smolvlm": 1}
"""Dimension in which images stand beside each other, if not the first."""


_ENCODES = "an encoder-decoder model"
_LARGE = "its config has no small form here"
NOT_TRIED = {
    "deepseek_ocr2": _LARGE, "unlimited_ocr": _LARGE, "emu3": _LARGE, "git": _LARGE,
    "muse_spark": _LARGE, "nemotron_h_omni": _LARGE,
    "inkling_mm_model": _LARGE, "qwen2_5_omni_thinker": _LARGE,
    "qwen3_omni_moe_thinker": _LARGE, "granite4_vision": _LARGE, "dots3_note": _LARGE,
    "glm5_next": _LARGE,
    "evolla": "takes proteins", "pi0": "makes actions", "mistral4": "takes text only",
    "gemma3n": "its tower needs the library timm",
    "florence2": _ENCODES, "t5gemma2": _ENCODES, "udop": _ENCODES, "vision-encoder-decoder": _ENCODES,
    "idefics": "attends to images by cross-attention",
    "kosmos-2": "its language model takes images beside its stream of vectors",
    "kosmos-2.5": "its language model takes images beside its stream of vectors",
}  # fmt: skip
"""Kinds of which no tiny checkpoint is made here -> why."""
NEEDS_TIMM = ("fast_vlm", "perception_lm")
"""Kinds whose towers are of the library timm: tried where it is installed."""
_PADS = "its processor pads images to a common size"
PROCESSORS = {
    "idefics2": _PADS, "lighton_ocr": _PADS, "mistral3": _PADS,
    "fuyu": "its processor lays images in front of a prompt that has no placeholders",
    "pp_chart2table": "its processor names no token that stands for an image",
}  # fmt: skip
"""Kinds whose vectors are those of transformers, and whose processor is refused when the model loads."""


def model_types() -> dict[str, str]:
    """``model_type`` -> class, of all that transformers has for images and text."""
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def outcomes(folder: Path, only: Sequence[str] | None = None) -> Iterator[Outcome]:
    """Try each; checkpoints are made below ``folder``."""
    for kind, name in sorted(model_types().items()):
        if kind in NEEDS_TIMM and find_spec("timm") is None:
            yield stored()[kind]
        elif only is None or kind in only:
            yield Outcome(kind, name, outcome_of(kind, name, folder / kind))


def outcome_of(kind: str, name: str, folder: Path) -> str:
    """What comes of one model: :data:`SERVED`, or why not."""
    torch.manual_seed(0)
    if kind in NOT_TRIED:
        return f"not tried: {NOT_TRIED[kind]}"
    reference = make(kind, name, folder)
    try:
        model = load(folder)
    except HeadraceError as error:
        message = str(error).splitlines()[0].replace(str(folder), "it")
        message = message.removeprefix("images: ").removeprefix("model 'it': ")
        return message.partition(". Its text alone")[0]
    worst = difference(model, reference, kind)
    if worst > TOLERANCE:
        return f"DIFFERS by {worst:.2g}"
    return PROCESSORS.get(kind, SERVED)


def stored() -> dict[str, Outcome]:
    """The published table."""
    rows = json.loads(TABLE.read_text())["models"]
    return {row["model_type"]: Outcome(**row) for row in rows}


def measured_with() -> str:
    """The version of transformers that the published table is of."""
    version: str = json.loads(TABLE.read_text())["transformers"]
    return version


def store(found: Sequence[Outcome]) -> None:
    """Publish a table."""
    rows = [dataclasses.asdict(outcome) for outcome in found]
    whole = {"transformers": transformers().__version__, "models": rows}
    TABLE.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def make(kind: str, name: str, folder: Path) -> Any:
    """A checkpoint with random weights; transformers' model."""
    model_class = getattr(transformers(), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = tiny_config(model_class.config_class, kind)
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class._from_config(config).parameters())
        if size > LARGEST:
            raise ValueError(f"its config has {size} parameters with the sizes that are known here")
        reference = model_class._from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        reference.eval()
        randomise(reference)
        reference.save_pretrained(folder)
    return reference


def tiny_config(config_class: Any, kind: str) -> Any:
    own = dict(OWN.get(kind, {}))
    names = every_causal_lm._names(config_class)
    values: dict[str, Any] = {}
    for key in ("image_token_id", "image_token_index"):
        if key in names or hasattr(config_class(), key):
            values[key] = IMAGE
    for name, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        sizes = VISION if "text" not in name else {**every_causal_lm.SMALL, **TEXT_SIZES}
        found = (
            type(getattr(config_class(), name, None))
            if not every_causal_lm._names(inner)
            else inner
        )
        if found is type(None):
            continue
        values[name] = {k: sizes[k] for k in every_causal_lm._names(found) if k in sizes}
        if hasattr(found, "model_type") and found.model_type:
            values[name]["model_type"] = found.model_type
    if "text_config" not in values:  # the language model's settings are the whole's
        values |= {key: size for key, size in TEXT_SIZES.items() if key in names}
    for name, value in own.items():
        both = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **value} if both else value
    return config_class(**values)


def load(folder: Path) -> Any:
    settings = ModelConfig(model=str(folder), model_impl="transformers", max_model_len=200)
    info = dataclasses.replace(
        resolve(settings, LoadConfig(), CpuPlatform()), processor="transformers"
    )
    return load_model(info, build_context(info))


def images_of(kind: str) -> list[dict[str, Tensor]]:
    if kind in INPUTS:
        return INPUTS[kind]()
    return [{"pixel_values": torch.randn(1, 3, SIDE, SIDE)} for _ in range(2)]


def difference(model: Any, reference: Any, kind: str) -> float:
    """Worst of log-probabilities: text, one image, two images whole, and in chunks that end in an image."""
    images = images_of(kind)
    with torch.inference_mode():
        vectors = model.embed_media("image", images)
    text = [5, 6, 7, 8, 9]
    one = [5, 6, *[IMAGE] * len(vectors[0]), 7]
    two = [*one, *[IMAGE] * len(vectors[1]), 8, 9]
    worst = 0.0
    for tokens, count, pieces in (
        (text, 0, [5]), (one, 1, [len(one)]), (two, 2, [len(two)]), (two, 2, [3, 2, len(two) - 6, 1]),
    ):  # fmt: skip
        got = run(model, tokens, images[:count], vectors[:count], pieces)
        expected = logprobs(reference, tokens, images[:count])
        worst = max(worst, float((got[:, : expected.shape[1]] - expected).abs().max()))
    return worst


def logprobs(reference: Any, tokens: list[int], images: Sequence[Mapping[str, Tensor]]) -> Tensor:
    ids = torch.tensor([tokens])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        dim = _BESIDE.get(reference.config.model_type, 0)
        given |= {key: torch.cat([image[key] for image in images], dim) for key in images[0]}
        takes = inspect.signature(reference.forward).parameters
        base = getattr(reference, "model", reference)
        if "mm_token_type_ids" in {*takes, *inspect.signature(base.forward).parameters}:
            given["mm_token_type_ids"] = (ids == IMAGE).int()
    with torch.inference_mode():
        return torch.log_softmax(reference(**given).logits[0].float(), dim=-1)


def run(
    model: Any,
    tokens: list[int],
    images: Sequence[dict[str, Tensor]],
    vectors: Sequence[Tensor],
    pieces: Sequence[int],
) -> Tensor:
    driver, found, done = PagedDriver(model), [], 0
    rows = [i for i, token in enumerate(tokens) if token == IMAGE]
    values = torch.cat(list(vectors)) if vectors else torch.zeros(0, 1)
    axes = None
    if isinstance(model, SupportsMRoPE):
        starts = [rows[sum(len(v) for v in vectors[:i])] for i in range(len(vectors))]
        axes = model.mrope_positions(
            len(tokens),
            [
                MediaInput("image", packed(image), str(i), len(v), start)
                for i, (image, v, start) in enumerate(zip(images, vectors, starts))
            ],
        )
    for size in pieces:
        mine = [i for i, row in enumerate(rows) if done <= row < done + size]
        extra: dict[str, Any] = {}
        if mine:
            at = torch.tensor([rows[i] - done for i in mine])
            extra[INPUT_EMBEDS] = InputEmbeds(at, values[mine])
        if axes is not None:
            extra[MROPE_POSITIONS] = axes[:, done : done + size]
        batch = driver.batch({"a": tokens[done : done + size]})
        with torch.inference_mode():
            hidden = model.forward(dataclasses.replace(batch, extra=extra))
            found.append(model.compute_logits(hidden).float())
        done += size
    assert done == len(tokens)
    return torch.log_softmax(torch.cat(found), dim=-1)
