"""Every model of transformers that answers about images, as a tiny checkpoint run by the transformers backend."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
OWN: dict[str, dict[str, Any]] = {}
"""Values of a family's config beside the sizes that its names tell."""
INPUTS: dict[str, Any] = {}
"""Makes a family's two images where they are not pixels [1, 3, SIDE, SIDE]."""


def model_types() -> dict[str, str]:
    """``model_type`` -> class, of all that transformers has for images and text."""
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def outcomes(folder: Path, only: Sequence[str] | None = None) -> Iterator[Outcome]:
    """Try each; checkpoints are made below ``folder``."""
    for kind, name in sorted(model_types().items()):
        if only is None or kind in only:
            yield Outcome(kind, name, outcome_of(kind, name, folder / kind))


def outcome_of(kind: str, name: str, folder: Path) -> str:
    torch.manual_seed(0)
    try:
        reference = make(kind, name, folder)
    except Exception as error:
        return f"not tried: no tiny checkpoint could be made ({type(error).__name__}: {str(error)[:200]})"
    try:
        model = load(folder)
        worst = difference(model, reference, kind)
    except HeadraceError as error:
        return str(error).splitlines()[0]
    return SERVED if worst <= TOLERANCE else f"DIFFERS by {worst:.2g}"


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
        reference = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
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
        if name in own:
            continue
        sizes = VISION if "text" not in name else {**every_causal_lm.SMALL, **TEXT_SIZES}
        found = type(getattr(config_class(), name, None)) if not every_causal_lm._names(inner) else inner
        if found is type(None):
            continue
        values[name] = {k: sizes[k] for k in every_causal_lm._names(found) if k in sizes}
        if hasattr(found, "model_type") and found.model_type:
            values[name]["model_type"] = found.model_type
    return config_class(**{**values, **own})


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
        given |= {key: torch.cat([image[key] for image in images]) for key in images[0]}
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
