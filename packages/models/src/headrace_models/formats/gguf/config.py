"""A GGUF file's metadata as the ``config.json`` that the model was converted from. No torch.

Keys are those of ggml's ``gguf.md``; what the metadata leaves out, because llama.cpp has it in its
code, is here too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.formats.gguf.header import PLAIN, GGUFHeader, GGUFTensor
from headrace_models.formats.gguf.names import DIALECTS, checkpoint_name

_DTYPES = {"F32": "float32", "F16": "float16"}
_MAX_FACTORS = 4096


def gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Content of ``config.json``, from a file's metadata and the types of its tensors.

    Raises:
        UnsupportedModel: the architecture is not read, or a key is missing or no number.
    """
    said = Metadata(header)
    architecture = said.architecture
    make = _FAMILIES.get(architecture)
    if make is None or architecture not in DIALECTS:
        raise UnsupportedModel(
            f"{header.path}: general.architecture = {architecture!r}: must be one of "
            f"{', '.join(_FAMILIES)}"
        )
    config = {
        **_common(said), **make(said), "quantization_config": gguf_quantization(header)
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


def gguf_quantization(header: GGUFHeader) -> dict[str, Any] | None:
    """A ``quantization_config`` that says which weights are stored in blocks: ``types`` has the type of each
    by its module's name in the checkpoint's words (``*``: any expert); None: all are plain."""
    dialect = DIALECTS.get(str(header.metadata.get("general.architecture")))
    if dialect is None:
        return None
    types: dict[str, str] = {}
    for tensor in header.tensors:
        if tensor.type.name in PLAIN:
            continue
        try:
            named = checkpoint_name(dialect, tensor.name)
        except UnsupportedModel:  # reading the weights refuses it, with its file's name
            continue
        if named is not None and named.name.endswith(".weight"):
            module = named.name.removesuffix(".weight").replace("{}", "*")
            types[module] = tensor.type.name
    return {"quant_method": "gguf", "types": types} if types else None


def gguf_generation_config(header: GGUFHeader) -> dict[str, Any]:
    """Content of ``generation_config.json``: the tokens that end an answer."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [header.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    ends = list(dict.fromkeys(end for end in found if isinstance(end, int)))
    begin = header.metadata.get("tokenizer.ggml.bos_token_id")
    return {
        **({"eos_token_id": ends} if ends else {}),
        **({"bos_token_id": begin} if isinstance(begin, int) else {}),
    }


class Metadata:
    """Typed look-ups below the architecture's prefix.

    Raises:
        UnsupportedModel: the file names no architecture.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self.path: Path = header.path
        self.values = header.metadata
        self.tensors: Mapping[str, GGUFTensor] = {t.name: t for t in header.tensors}
        name = self.values.get("general.architecture")
        if not isinstance(name, str):
            raise UnsupportedModel(f"{self.path}: general.architecture = {name!r}: must be a name")
        self.architecture = name

    def number(self, key: str) -> float | None:
        """A key's number; of a list, one for each layer, the one that all have in common."""
        full = f"{self.architecture}.{key}"
        value = self.values.get(full)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise UnsupportedModel(f"{self.path}: {full} differs from layer to layer")
            value = value[0]
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise UnsupportedModel(f"{self.path}: {full} = {value!r}: must be a finite number")
        return value

    def integer(self, key: str) -> int | None:
        """Value as :meth:`number` gives it, without a fraction."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise UnsupportedModel(
                f"{self.path}: {self.architecture}.{key} = {value!r}: must be whole"
            )
        return None if value is None else int(value)

    def needed(self, key: str) -> int:
        """Value as :meth:`integer` gives it, of a key that every file has."""
        value = self.integer(key)
        if value is None or value < 1:
            raise UnsupportedModel(
                f"{self.path}: {self.architecture}.{key} = {value!r}: must be a number above 0"
            )
        return value

    def factors(self, name: str) -> list[float] | None:
        """The numbers of a small float32 tensor; None if it is not there."""
        tensor = self.tensors.get(f"{name}.weight")
        if tensor is None:
            return None
        if tensor.type.name != "F32" or tensor.num_bytes > 4 * _MAX_FACTORS:
            raise UnsupportedModel(
                f"{self.path}: tensor {tensor.name!r}: must be a few F32 numbers"
            )
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            content = file.read(tensor.num_bytes)
        return list(struct.unpack(f"<{len(content) // 4}f", content))

    def text(self, key: str) -> str | None:
        """A key's text, None if it has none."""
        value = self.values.get(f"{self.architecture}.{key}")
        return value if isinstance(value, str) else None


def _common(said: Metadata) -> dict[str, Any]:
    """Keys that all architectures of :data:`_FAMILIES` have."""
    embedding = said.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModel(f"{said.path}: tensor 'token_embd.weight' is missing, or no matrix")
    return {
        "model_type": said.architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": said.needed("embedding_length"),
        "num_hidden_layers": said.needed("block_count"),
        "intermediate_size": said.integer("feed_forward_length"),
        "num_attention_heads": said.needed("attention.head_count"),
        "num_key_value_heads": said.integer("attention.head_count_kv"),
        "head_dim": said.integer("attention.key_length"),
        "max_position_embeddings": said.needed("context_length"),
        "rms_norm_eps": said.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": said.number("rope.freq_base"),
        "rope_scaling": _rope_scaling(said),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in said.tensors,
        "dtype": _bulk_dtype(said),
        **gguf_token_ids(said),
    }


def gguf_token_ids(said: Metadata) -> dict[str, Any]:
    """Ids of the tokens that begin and end a text."""
    ids = {name: said.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token_id": value for name, value in ids.items() if isinstance(value, int)}


def _bulk_dtype(said: Metadata) -> str:
    """Dtype that most of the bytes have. Blocks do not say what their model was trained in: bfloat16 holds
    the activations of all, which float16 does not."""
    sizes: dict[str, int] = {}
    for tensor in said.tensors.values():
        dtype = _DTYPES.get(tensor.type.name, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _rope_scaling(said: Metadata) -> dict[str, Any] | None:
    original = said.integer("rope.scaling.original_context_length")
    short, long = said.factors("rope_factors_short"), said.factors("rope_factors_long")
    if short is not None and long is not None:  # Phi-3
        return _without_none(
            rope_type="longrope", short_factor=short, long_factor=long,
            original_max_position_embeddings=original,
            attention_factor=said.number("rope.scaling.attn_factor"),
        )  # fmt: skip
    same = said.factors("rope_freqs")
    if same is not None:  # Llama 3: the converter keeps what its scaling comes to
        return {
            "rope_type": "longrope", "short_factor": same, "long_factor": same,
            "original_max_position_embeddings": said.needed("context_length"),
            "attention_factor": 1.0,
        }  # fmt: skip
    kind, factor = said.text("rope.scaling.type"), said.number("rope.scaling.factor")
    if kind in (None, "none") or factor is None:
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{said.path}: rope.scaling.type = {kind!r}: must be linear or yarn")
    return _without_none(rope_type=kind, factor=factor, original_max_position_embeddings=original)


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _llama(said: Metadata) -> dict[str, Any]:
    experts = said.integer("expert_count") or 0
    return {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in said.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in said.tensors,
        "head_dim": said.integer("attention.key_length") or said.integer("rope.dimension_count"),
        "num_local_experts": experts or None,
        "num_experts_per_tok": said.integer("expert_used_count"),
    }


def _qwen2(said: Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(said: Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"]}


def _qwen2_moe(said: Metadata) -> dict[str, Any]:
    """Early files have one size, which the experts of a token share, and which the shared expert has."""
    experts, size = _experts(said), said.needed("feed_forward_length")
    if experts["moe_intermediate_size"] is None:
        experts["moe_intermediate_size"] = size // experts["num_experts_per_tok"]
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        **experts,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": said.integer("expert_shared_feed_forward_length")
        or size,
    }


def _qwen3_moe(said: Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen3MoeForCausalLM"], **_experts(said), "norm_topk_prob": True}


def _experts(said: Metadata) -> dict[str, Any]:
    return {
        "num_experts": said.needed("expert_count"),
        "num_experts_per_tok": said.needed("expert_used_count"),
        "moe_intermediate_size": said.integer("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(said: Metadata) -> dict[str, Any]:
    activation = "gelu_pytorch_tanh"
    return {
        "architectures": ["GemmaForCausalLM"],
        "hidden_act": activation,
        "hidden_activation": activation,
    }


def _gemma2(said: Metadata) -> dict[str, Any]:
    return {
        **_gemma(said),
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": said.integer("attention.sliding_window") or 4096,
        "attn_logit_softcapping": said.number("attn_logit_softcapping"),
        "final_logit_softcapping": said.number("final_logit_softcapping"),
        "query_pre_attn_scalar": _gemma_scale(said, largest=46),
    }


def _gemma3(said: Metadata) -> dict[str, Any]:
    theta = said.number("rope.freq_base") or 1_000_000.0
    full = {**(_rope_scaling(said) or {"rope_type": "default"}), "rope_theta": theta}
    local = {
        "rope_type": "default",
        "rope_theta": said.number("rope.freq_base_swa") or 10_000.0,
    }
    return {
        **_gemma(said),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": said.integer("attention.sliding_window") or 4096,
        "final_logit_softcapping": said.number("final_logit_softcapping"),
        "query_pre_attn_scalar": _gemma_scale(said, largest=62),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _gemma_scale(said: Metadata, largest: int) -> int | None:
    """Gemma's ``query_pre_attn_scalar``: the largest models, known by their number of layers, divide by the
    share of the hidden size that a head has, the others by the head's own size."""
    if said.needed("block_count") == largest:
        return said.needed("embedding_length") // said.needed("attention.head_count")
    return said.integer("attention.key_length")


def _phi3(said: Metadata) -> dict[str, Any]:
    hidden, heads = said.needed("embedding_length"), said.needed("attention.head_count")
    if hidden < heads:
        raise UnsupportedModel(
            f"{said.path}: phi3.attention.head_count = {heads}: must be at most {hidden}, the "
            "embedding_length"
        )
    head = hidden // heads
    turning = said.integer("rope.dimension_count")
    original = said.integer("rope.scaling.original_context_length")
    return {
        "architectures": ["Phi3ForCausalLM"],
        # Not below the quotient: the number of dimensions is cut from the product.
        "partial_rotary_factor": None if turning is None else math.nextafter(turning / head, 2),
        "original_max_position_embeddings": original,
        "sliding_window": said.integer("attention.sliding_window") or None,
    }


_FAMILIES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe, "gemma": _gemma, "gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3,
}  # fmt: skip
