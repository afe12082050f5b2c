"""Every causal language model of transformers as a tiny checkpoint, run by the transformers backend."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import HeadraceError
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_models.transformers_backend import classes
from headrace_models.transformers_backend.library import transformers
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context, randomise

TABLE = Path(__file__).parent / "transformers_models.json"
"""What came of each, as it is published."""
SERVED = "served"
LENGTH = 29
TOLERANCE = 1e-4

SMALL: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 128, "n_inner": 48, "n_ctx": 128, "d_model": 64, "dff": 48, "sliding_window": 9,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "moe_num_experts": 4,
    "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "qk_head_dim": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "ffn_hidden_size": 48, "embedding_size": 64,
    "word_embed_proj_dim": 64, "ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "is_decoder": True, "num_layers": 2, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 4, "attention_chunk_size": 8, "query_pre_attn_scalar": 20, "moe_num_shared_experts": 1,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131, "num_shared_experts": 1,
    "moe_layer_start_index": 1, "num_dense_layers": 1, "expert_ffn_hidden_size": 24, "laurel_rank": 4,
    "dim_model_base": 32, "shared_intermediate_size": 24, "layer_types": None, "initializer_range": 0.1,
    "intermediate_size_mlp": 48, "sparsity_pattern": None, "activation_sparsity_pattern": None,
    "num_kv_shared_layers": 0, "mlp_layer_types": None, "max_window_layers": 1, "no_rope_layers": None,
    "moe_layers": None, "global_head_dim": 16, "num_global_key_value_heads": 2, "type_vocab_size": 2,
}  # fmt: skip
"""Sizes of a tiny model, by the names that configs have for them."""

_AS_MANY = {"num_key_value_heads": 4}
_TYPES = ["sliding_attention", "full_attention"]
OWN: dict[str, dict[str, Any]] = {
    "axk1": _AS_MANY, "axk2": _AS_MANY, "deepseek_v2": _AS_MANY, "deepseek_v3": _AS_MANY,
    "deepseek_v32": _AS_MANY, "glm4_moe_lite": _AS_MANY, "glm_moe_dsa": _AS_MANY, "minicpm3": _AS_MANY,
    "longcat_flash": {**_AS_MANY, "head_dim": 8}, "youtu": _AS_MANY, "dots3_note": _AS_MANY,
    "dots3_note_text": _AS_MANY,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _TYPES * 2},
    "gemma4_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _TYPES * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "cohere_compass_text": {"layer_types": _TYPES, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _TYPES}},

    "moshi": {"audio_vocab_size": 40},
    "gemma3_text": {"layer_types": _TYPES}, "gemma2": {"layer_types": _TYPES},
    "qwen2": {"use_sliding_window": True, "layer_types": _TYPES},
    "qwen3": {"use_sliding_window": True, "layer_types": _TYPES},
}  # fmt: skip
"""Where a family needs other values than :data:`SMALL`, or more of them."""

NOT_TRIED = {
    "gemma3n": "not tried: its tower for images needs the library timm",
    "gemma4_assistant": "not tried: drafts for another model, whose states it reads",
    "gemma4_unified_assistant": "not tried: drafts for another model, whose states it reads",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one model."""

    model_type: str
    architecture: str
    result: str
    """:data:`SERVED`, or the reason why not."""


def model_types() -> dict[str, str]:
    """``model_type`` -> class, of all that transformers has as causal language models."""
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def outcomes(folder: Path, only: list[str] | None = None) -> Iterator[Outcome]:
    """Try each; checkpoints are made below ``folder``."""
    for kind, name in sorted(model_types().items()):
        if only is None or kind in only:
            yield Outcome(kind, name, _outcome(kind, name, folder / kind.replace("/", "_")))


def stored() -> dict[str, Outcome]:
    """The published table."""
    rows = json.loads(TABLE.read_text())["models"]
    return {row["model_type"]: Outcome(**row) for row in rows}


def measured_with() -> str:
    """The version of transformers that the published table is of."""
    version: str = json.loads(TABLE.read_text())["transformers"]
    return version


def stored_captures() -> dict[str, str]:
    """``model_type`` of each that is served -> "captured", or why its steps run eagerly."""
    captures: dict[str, str] = json.loads(TABLE.read_text())["steps"]
    return captures


def store(found: list[Outcome], captures: dict[str, str]) -> None:
    """Publish a table."""
    rows = [dataclasses.asdict(outcome) for outcome in found]
    whole = {"transformers": transformers().__version__, "models": rows, "steps": captures}
    TABLE.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def _outcome(kind: str, name: str, folder: Path) -> str:
    model_class = getattr(transformers(), name)
    try:
        classes.check(model_class, kind)
    except HeadraceError as error:
        return str(error)
    if kind in NOT_TRIED:
        return NOT_TRIED[kind]
    checkpoint = make(model_class, tiny_config(model_class.config_class, kind), folder)
    try:
        settings = ModelConfig(model=str(folder), model_impl="transformers", max_model_len=64)
        info = resolve(settings, LoadConfig(), CpuPlatform())
        driver = PagedDriver(load_model(info, build_context(info)))
        worst = _difference(driver, checkpoint, info.vocab_size)
    except HeadraceError as error:
        return str(error)
    return SERVED if worst <= TOLERANCE else f"DIFFERS by {worst:.2g}"


def _difference(driver: PagedDriver, checkpoint: Checkpoint, vocab: int) -> float:
    """Of log-probabilities: two requests in one batch, one in chunks, then a step for each."""
    chooser = random.Random(0)
    a, b = ([chooser.randrange(3, vocab) for _ in range(n)] for n in (LENGTH, 7))
    pieces = [driver.step({"a": a[:11]}), driver.step({"b": b[:5], "a": a[11:-1]}),
              driver.step({"a": a[-1:], "b": b[5:]})]  # fmt: skip
    got = torch.cat(
        (pieces[0], pieces[1][5:], pieces[2][:1], pieces[1][:5], pieces[2][1:])
    ).log_softmax(-1)
    wanted = torch.cat((checkpoint.logprobs(a), checkpoint.logprobs(b)))
    return float((got[:, : wanted.shape[1]] - wanted).abs().max())


def make(model_class: Any, config: Any, folder: Path) -> Checkpoint:
    """A checkpoint with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = model_class._from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        reference.eval()
        randomise(reference)
        reference.save_pretrained(folder)
    return Checkpoint(reference, folder)


def tiny_config(config_class: Any, kind: str) -> Any:
    """A config of a class, as small as its names tell."""
    own = OWN.get(kind, {})
    names = _names(config_class)
    values: dict[str, Any] = {name: SMALL[name] for name in names if name in SMALL}
    for name, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        kind_of = inner if _names(inner) else type(getattr(config_class(), name, None))
        if kind_of is not type(None) and _names(kind_of):
            values[name] = tiny_config(kind_of, f"{kind}.{name}").to_dict()
    return config_class(**{**values, **own})


def _names(config_class: Any) -> set[str]:
    fields = getattr(config_class, "__dataclass_fields__", {})
    return {name for name, field in fields.items() if field.init}
