"""Families whose code is their publishers' own: checkpoints in their layouts, beside models of
transformers that compute the same with the same numbers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from model_families_conformance import FamilyConformance
from relaid_conformance import RelaidConformance, alibi_mask, rewrite
from safetensors.torch import load_file
from torch import Tensor

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_models.families.decoder import baichuan
from headrace_models.layers.attention.alibi import alibi_slopes
from headrace_testing.model.decoders import Checkpoint, PagedDriver

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
}
LAYER = r"model\.layers\.(\d+)\."


class RelaidLlama(RelaidConformance):
    """Beside transformers' Llama."""

    flips_ties = False
    spells: ClassVar[dict[str, str]] = {}
    """Pattern of a name's part -> how the published checkpoint has it."""
    keys: ClassVar[dict[str, str]] = {}
    """Key of the config -> how the published one has it."""

    def hf_class(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(**{**TINY, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        del config["attention_bias"], config["mlp_bias"]
        spelled = {self.keys.get(key, key): value for key, value in config.items()}
        return {**spelled, "model_type": "remote"}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self.spelled(name): tensor for name, tensor in tensors.items()}

    def spelled(self, name: str) -> str:
        for pattern, own in self.spells.items():
            name = re.sub(pattern, own, name)
        return name


def layers(tensors: dict[str, Tensor], suffix: str) -> list[str]:
    """Names of every layer's tensor with that ending, without the ending."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def by_group(tensors: list[Tensor], groups: int) -> Tensor:
    """Rows of several tensors, a piece of each at a time."""
    pieces = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
    return torch.cat(pieces, dim=1).flatten(0, 1)


def fused(
    tensors: dict[str, Tensor], parts: tuple[str, ...], whole: str, groups: int = 1
) -> dict[str, Tensor]:
    """Each layer's tensors of some modules as one."""
    for kind in (".weight", ".bias"):
        for prefix in layers(tensors, parts[0] + kind):
            pieces = [tensors.pop(prefix + part + kind) for part in parts]
            tensors[prefix + whole + kind] = by_group(pieces, groups)
    return tensors


QKV = ("q_proj", "k_proj", "v_proj")


class TestInternLM(RelaidLlama):
    published = "InternLMForCausalLM"

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"attention_bias": True, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().config_of(config), "bias": True}

    def test_pangu(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        checkpoint.reference.save_pretrained(tmp_path)
        rewrite(tmp_path, architectures=["PanguEmbeddedForCausalLM"])
        check(self, checkpoint, tmp_path)


class TestInternLM2(RelaidLlama):
    published = "InternLM2ForCausalLM"
    spells: ClassVar[dict[str, str]] = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn": "attention",
        "o_proj": "wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        scaling = {"type": "dynamic", "factor": 2.0}
        return {**super().config_of(config), "bias": False, "rope_scaling": scaling}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().tensors_of(fused(tensors, QKV, "wqkv", groups=2))


class TestInternLM3(RelaidLlama):
    """Biases of query, key and value only."""

    published = "InternLM3ForCausalLM"

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"attention_bias": True, "head_dim": 22, **overrides})

    def finish(self, reference: Any) -> None:
        for layer in reference.model.layers:
            layer.self_attn.o_proj.bias.zero_()

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().config_of(config), "qkv_bias": True, "bias": False}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t for name, t in tensors.items() if not name.endswith("o_proj.bias")}


class RelaidGranite(RelaidLlama):
    """Beside transformers' Granite, which has every multiplier."""

    def hf_class(self) -> Any:
        from transformers import GraniteForCausalLM

        return GraniteForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GraniteConfig

        return GraniteConfig(**{**TINY, "attention_multiplier": 18**-0.5, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in super().config_of(config).items()
                if not key.endswith(("_multiplier", "_scaling"))}  # fmt: skip


class TestTeleFLM(RelaidGranite):
    published = "TeleFLMForCausalLM"

    def hf_config(self, **overrides: Any) -> Any:
        own = {"embedding_multiplier": 2.5, "logits_scaling": 4 / 3}
        return super().hf_config(**{**own, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        own = {"use_mup": True, "input_mult": 2.5, "output_mult": 3.0, "mup_scale_factor": 4.0}
        return {**super().config_of(config), **own}


class TestMiniCPM(RelaidGranite):
    published = "MiniCPMForCausalLM"
    flips_ties = True

    def hf_config(self, **overrides: Any) -> Any:
        own = {"embedding_multiplier": 1.7, "residual_multiplier": 1.4 / 3**0.5,
               "logits_scaling": 72 / 48, "tie_word_embeddings": True}  # fmt: skip
        return super().hf_config(**{**own, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        own = {"scale_emb": 1.7, "scale_depth": 1.4, "dim_model_base": 48}
        return {**super().config_of(config), **own}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            del tensors["lm_head.weight"]
        return tensors

    def test_sparse_attention_begins_beyond_the_context(self, tmp_path: Path) -> None:
        """MiniCPM 4.1 attends to everything in texts of fewer than ``dense_len`` tokens."""
        sparse = {"kernel_size": 32, "topk": 64, "dense_len": self.max_model_len}
        path = self.make_checkpoint(tmp_path).path
        rewrite(path, sparse_config=sparse)
        self.open(path)
        with pytest.raises(UnsupportedModel, match=r"must be at most \d+, sparse_config.dense_len"):
            self.open(path, max_model_len=self.max_model_len + 1)
        wrong = {"dense_len = -1": {**sparse, "dense_len": -1}, "sparse_config = .1.: must be": [1]}
        for message, value in wrong.items():
            rewrite(path, sparse_config=value)
            with pytest.raises(UnsupportedModel, match=message):
                self.open(path)


class TestTeleChat2(RelaidLlama):
    """Biases behind both halves only."""

    published = "TeleChat2ForCausalLM"
    keys: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
    }
    spells: ClassVar[dict[str, str]] = {
        r"model\.embed_tokens": "transformer.word_embeddings",
        r"model\.layers": "transformer.h",
        r"model\.norm": "transformer.ln_f",
        "self_attn": "self_attention",
        "q_proj": "query",
        "o_proj": "dense",
    }

    def hf_config(self, **overrides: Any) -> Any:
        own = {"attention_bias": True, "mlp_bias": True}
        return super().hf_config(**{**own, **overrides})

    def finish(self, reference: Any) -> None:
        for name, parameter in reference.named_parameters():
            if name.endswith(
                ("q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias")
            ):
                parameter.zero_()

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: t for name, t in tensors.items()
                if not name.endswith(".bias") or "o_proj" in name or "down_proj" in name}  # fmt: skip
        return super().tensors_of(fused(kept, ("k_proj", "v_proj"), "key_value", groups=2))


class TestDeci(RelaidLlama):
    """Layers with four, two and one key-value heads; one has no attention and one no MLP. The reference
    has all heads, some of them equal, and zeros for what is left out."""

    published = "DeciLMForCausalLM"
    tensor_parallel = 1
    kv_heads = (4, 2, 1, 4, 2)
    blocks: ClassVar[list[dict[str, Any]]] = [
        {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.1}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 5.33}},
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 5.33}},
    ]
    """The MLPs have 256 outputs: 96, 149 and 256 rounded up."""

    def hf_config(self, **overrides: Any) -> Any:
        own = {"num_hidden_layers": 5, "num_key_value_heads": 4, "intermediate_size": 256}
        return super().hf_config(**{**own, **overrides})

    def finish(self, reference: Any) -> None:
        for layer, heads, block in zip(reference.model.layers, self.kv_heads, self.blocks):
            for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                own = part.weight.unflatten(0, (heads, -1, 18))[:, :1]
                part.weight.copy_(own.expand(-1, 4 // heads, -1, -1).flatten(0, 2))
            if block["attention"].get("no_op"):
                layer.self_attn.o_proj.weight.zero_()
            if block["ffn"].get("no_op"):
                layer.mlp.down_proj.weight.zero_()

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().config_of(config)
        del config["intermediate_size"], config["num_key_value_heads"]
        return {**config, "block_configs": self.blocks}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = ("3.self_attn", "3.input_layernorm", "1.mlp", "1.post_attention_layernorm")
        kept = {}
        for name, tensor in tensors.items():
            index, _, rest = name.removeprefix("model.layers.").partition(".")
            if rest.startswith(("self_attn.k_proj", "self_attn.v_proj")):
                heads = self.kv_heads[int(index)]
                tensor = tensor.unflatten(0, (heads, -1, 18))[:, 0].flatten(0, 1)
            if not f"{index}.{rest}".startswith(out):
                kept[name] = tensor
        return kept

    @pytest.mark.parametrize(
        ("blocks", "word"),
        [
            (3, "block_configs"),
            ([{}] * 5, "no object 'attention'"),
            ([{"attention": {"n_heads_in_group": 2}, "ffn": {}}] * 5, "intermediate_size"),
            ([{"attention": {"n_heads_in_group": 3}, "ffn": {}}] * 5, "1.33333 key-value heads"),
            ([{"attention": {"n_heads_in_group": 9}, "ffn": {}}] * 5, "0.444444 key-value heads"),
            ([{"attention": {"replace_with_linear": True}, "ffn": {}}] * 5, "replace_with_linear"),
        ],
    )
    def test_descriptions_that_are_refused(
        self, checkpoint: Checkpoint, tmp_path: Path, blocks: Any, word: str
    ) -> None:
        checkpoint.reference.save_pretrained(tmp_path)
        rewrite(tmp_path, block_configs=blocks)
        with pytest.raises(UnsupportedModel, match=word):
            self.open(tmp_path)


class TestDeci7B(RelaidLlama):
    """Key-value heads by layer."""

    published = "DeciLMForCausalLM"
    kv_heads = (4, 2, 1)
    tensor_parallel = 1

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"num_key_value_heads": 4, **overrides})

    blocks: ClassVar[list[dict[str, Any]]] = [{"attention": {}, "ffn": {}}] * 3

    def finish(self, reference: Any) -> None:
        TestDeci.finish(self, reference)  # type: ignore[arg-type]

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().config_of(config)
        del config["num_key_value_heads"]
        return {**config, "num_key_value_heads_per_layer": list(self.kv_heads)}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for index, heads in enumerate(self.kv_heads):
            for part in ("k_proj", "v_proj"):
                name = f"model.layers.{index}.self_attn.{part}.weight"
                tensors[name] = tensors[name].unflatten(0, (heads, -1, 18))[:, 0].flatten(0, 1)
        return tensors


class Stepped(RelaidLlama):
    """A reference whose layers are called one by one."""

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        hidden = model.model.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        turned = model.model.rotary_emb(hidden, positions)
        causal = alibi_mask(torch.zeros(1), ids.shape[1])

        def step(layer: Any, x: Tensor) -> Tensor:
            out: Tensor = layer(x, attention_mask=causal, position_embeddings=turned)
            return out

        found: Tensor = model.lm_head(self.stacked(model.model, hidden, step))
        return found

    def stacked(self, model: Any, x: Tensor, step: Any) -> Tensor:
        """All layers and the last norm."""
        raise NotImplementedError


class TestSolar(Stepped):
    """The stream before layers 1 and 2 comes again before 3, and before 4 and 5; 2 is kept twice."""

    no_stages = "a way of its own"
    published = "SolarForCausalLM"
    skips: ClassVar[dict[str, Any]] = {
        "bskcn_1": [1, 2],
        "bskcn_2": [2],
        "bskcn_3": [3],
        "bskcn_4": [4, 5],
        "bskcn_tv": [0.9, 0.7],
    }

    def hf_config(self, **overrides: Any) -> Any:
        own = {"num_hidden_layers": 6, "intermediate_size": 60}
        return super().hf_config(**{**own, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().config_of(config), **self.skips, "sliding_window": 5}

    def stacked(self, model: Any, x: Tensor, step: Any) -> Tensor:
        kept: dict[str, Tensor] = {}
        for index, layer in enumerate(model.layers):
            for here, there in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
                if index in self.skips[here]:
                    kept[here] = x
                if index in self.skips[there]:
                    x = 0.7 * kept[here] + 0.3 * x
            x = step(layer, x)
        out: Tensor = model.norm(x)
        return out

    def test_a_mixture_without_a_source(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="bskcn_4"):
            self.open(checkpoint.path, hf_overrides={"bskcn_2": [5]})


class TestOuro(Stepped):
    """Three passes."""

    no_stages = "a way of its own"
    without_adapters = ("early_exit",)
    published = "OuroForCausalLM"

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"num_hidden_layers": 2, "num_key_value_heads": 4, **overrides})

    def prepare(self, reference: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        for layer in reference.model.layers:
            layer.input_layernorm_2 = LlamaRMSNorm(72, 1e-5)
            layer.post_attention_layernorm_2 = LlamaRMSNorm(72, 1e-5)
            layer.self_attn.register_forward_hook(
                lambda _, __, out, norm=layer.input_layernorm_2: (norm(out[0]), *out[1:])
            )
            layer.mlp.register_forward_hook(
                lambda _, __, out, norm=layer.post_attention_layernorm_2: norm(out)
            )
        reference.model.early_exit_gate = torch.nn.Linear(72, 1)

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().config_of(config), "total_ut_steps": 3, "early_exit_threshold": 1.0}

    def stacked(self, model: Any, x: Tensor, step: Any) -> Tensor:
        for _ in range(3):
            for layer in model.layers:
                x = step(layer, x)
            x = model.norm(x)
        return x

    def test_each_pass_has_a_cache(self, model: Any) -> None:
        names = list(model.attention_layers())
        assert len(names) == len(set(names)) == 6

    def test_ending_early_is_refused(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="early_exit_threshold"):
            self.open(checkpoint.path, hf_overrides={"early_exit_threshold": 0.5})


class TestIQuestLoop(Stepped):
    """Two passes, a window of nine in the second; the reference's attention is written out."""

    no_stages = "a way of its own"
    without_adapters = ("gate_projections",)
    published = "IQuestLoopCoderForCausalLM"

    def prepare(self, reference: Any) -> None:
        gates = (torch.nn.Linear(18, 4) for _ in reference.model.layers)
        reference.model.gate_projections = torch.nn.ModuleList(gates)

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().config_of(config), "loop_num": 2, "loop_window_size": 9}

    def stacked(self, model: Any, x: Tensor, step: Any) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        length = x.shape[1]
        turned = model.rotary_emb(x, torch.arange(length)[None])
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen, near = distance >= 0, (distance >= 0) & (distance < 9)
        first: list[tuple[Tensor, Tensor]] = []
        for number in range(2):
            for index, layer in enumerate(model.layers):
                attention, y = layer.self_attn, layer.input_layernorm(x)
                parts = (attention.q_proj(y), attention.k_proj(y), attention.v_proj(y))
                query, key, value = (p.unflatten(-1, (-1, 18)).transpose(1, 2) for p in parts)
                query, key = apply_rotary_pos_emb(query, key, *turned)
                if number == 0:
                    first.append((key, value))
                    out = attend(query, key, value, seen)
                else:
                    gate = model.gate_projections[index]
                    logits = (query * gate.weight[:, None]).sum(-1) + gate.bias[:, None]
                    far, share = attend(query, *first[index], seen), logits.sigmoid()[..., None]
                    out = share * far + (1 - share) * attend(query, key, value, near)
                x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        last: Tensor = model.norm(x)
        return last


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Of 4 heads [1, 4, T, D] to 2."""
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = (query @ key.transpose(-1, -2) / 18**0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


class TestExaone(RelaidLlama):
    published = "ExaoneForCausalLM"
    keys: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    spells: ClassVar[dict[str, str]] = {
        r"model\.embed_tokens": "transformer.wte",
        r"model\.layers": "transformer.h",
        r"model\.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn": "attn.attention",
        "o_proj": "out_proj",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
    }


class TestPlamo3(RelaidConformance):
    """Beside Gemma 3, whose norms all lack 1."""

    published = "Plamo3ForCausalLM"
    flips_ties = False
    names: ClassVar[dict[str, tuple[str, float]]] = {
        "input_layernorm": ("pre_mixer_norm", 0.0),
        "post_attention_layernorm": ("post_mixer_norm", 1 - 1 / 5),
        "pre_feedforward_layernorm": ("pre_mlp_norm", 0.0),
        "post_feedforward_layernorm": ("post_mlp_norm", 1 - 1 / 5**1.5),
    }

    def hf_class(self) -> Any:
        from transformers import Gemma3ForCausalLM

        return Gemma3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Gemma3TextConfig

        own = {
            "num_hidden_layers": 4, "head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 20,
            "hidden_activation": "silu", "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        }  # fmt: skip
        return Gemma3TextConfig(**{**TINY, **own, **overrides})

    def prepare(self, reference: Any) -> None:
        reference.model.embed_tokens.embed_scale.fill_(1.0)

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        for key in ("layer_types", "rope_parameters", "sliding_window", "_sliding_window_pattern"):
            config.pop(key, None)
        own = {"window_size": 7, "sliding_window_pattern": 2, "rope_theta": 3000.0,
               "rope_local_theta": 50.0, "model_type": "plamo3"}  # fmt: skip
        return {**config, **own}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = fused(tensors, QKV, "qkv_proj")
        tensors = fused(tensors, ("gate_proj", "up_proj"), "gate_up_proj")
        out = {}
        for name, tensor in tensors.items():
            for norm, (own, lacks) in self.names.items():
                if f".{norm}." in name:
                    name, tensor = name.replace(norm, own), tensor + lacks
                    break
            out[
                name.replace("model.layers", "model.layers.layers").replace("self_attn", "mixer")
            ] = tensor
        return out

    def test_windows_layer_by_layer(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        checkpoint.reference.save_pretrained(tmp_path)
        rewrite(tmp_path, drop=("window_size", "sliding_window_pattern"),
                sliding_window=[7, None, 7, None])  # fmt: skip
        check(self, checkpoint, tmp_path)


class TestBaichuan7B(RelaidLlama):
    published = "BaichuanForCausalLM"

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"num_key_value_heads": 4, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().config_of(config)
        del config["num_key_value_heads"]
        return {**config, "model_max_length": 128}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return fused(tensors, QKV, "W_pack")

    def test_the_first_name(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        checkpoint.reference.save_pretrained(tmp_path)
        rewrite(tmp_path, architectures=["BaiChuanForCausalLM"])
        check(self, checkpoint, tmp_path)


class TestBaichuan2Of13B(TestBaichuan7B):
    """ALiBi, of as many heads as no power of two, and a head whose rows have length 1."""

    without_adapters = ("lm_head",)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def small_vocabulary(cls) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(baichuan, "VOCABULARY_OF_2", 131)
            yield

    def hf_config(self, **overrides: Any) -> Any:
        own = {"num_attention_heads": 6, "num_key_value_heads": 6}
        return super().hf_config(**{**own, **overrides})

    def finish(self, reference: Any) -> None:
        reference.model.rotary_emb.inv_freq.zero_()
        self.head = reference.lm_head.weight.clone()
        reference.lm_head.weight.copy_(5 * torch.nn.functional.normalize(self.head))

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        return super().logits(model, ids, mask) / 5

    def mask(self, length: int) -> Tensor:
        return alibi_mask(alibi_slopes(6), length)

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().config_of(config)
        del config["max_position_embeddings"]
        return config


class TestOrion(RelaidLlama):
    published = "OrionForCausalLM"

    def prepare(self, reference: Any) -> None:
        for layer in reference.model.layers:
            layer.input_layernorm = torch.nn.LayerNorm(72, 1e-5)
            layer.post_attention_layernorm = torch.nn.LayerNorm(72, 1e-5)
        reference.model.norm = torch.nn.LayerNorm(72, 1e-5)


class TestFairseq2(RelaidLlama):
    """Rotary pairs are neighbours."""

    published = "Fairseq2LlamaForCausalLM"
    spells: ClassVar[dict[str, str]] = {
        r"model\.embed_tokens": "decoder_frontend.embed",
        r"model\.layers": "decoder.layers",
        r"model\.norm": "decoder.layer_norm",
        "lm_head": "final_proj",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "ffn_layer_norm",
        "o_proj": "output_proj",
        r"mlp\.gate_proj": "ffn.gate_proj",
        r"mlp\.up_proj": "ffn.inner_proj",
        r"mlp\.down_proj": "ffn.output_proj",
    }

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if "q_proj" in name or "k_proj" in name:
                halves = tensor.unflatten(0, (-1, 2, 9))
                tensors[name] = halves.transpose(1, 2).flatten(0, 2)
        return super().tensors_of(tensors)

    def write_ranks(self, checkpoint: Checkpoint, folder: Path, count: int) -> None:
        """As fairseq2 saves a model that is spread over ranks."""
        shutil.copy(checkpoint.path / "config.json", folder)
        tensors = load_file(checkpoint.path / "model.safetensors")
        for rank in range(count):
            own = {}
            for name, tensor in tensors.items():
                along = int(name.endswith("output_proj.weight"))
                whole = tensor.dim() == 1
                own[name] = tensor if whole else tensor.chunk(count, along)[rank].clone()
            torch.save({"model_key": "llama", "llama": own}, folder / f"model.{rank}.pt")

    def divisible(self, folder: Path) -> Checkpoint:
        """A checkpoint whose sizes many numbers of ranks divide."""
        folder.mkdir()
        return self.make_checkpoint(folder, vocab_size=132, intermediate_size=96)

    @pytest.mark.parametrize("count", [1, 4, 12])
    def test_files_of_ranks(self, tmp_path: Path, count: int) -> None:
        checkpoint = self.divisible(tmp_path / "whole")
        self.write_ranks(checkpoint, tmp_path, count)
        check(self, checkpoint, tmp_path)

    def test_files_of_ranks_that_do_not_agree(self, tmp_path: Path) -> None:
        checkpoint = self.divisible(tmp_path / "whole")
        self.write_ranks(checkpoint, tmp_path, 3)
        file, name = tmp_path / "model.1.pt", "decoder.layer_norm.weight"
        saved = torch.load(file)
        saved["llama"][name] += 1
        torch.save(saved, file)
        with pytest.raises(WeightsError, match=r"decoder\.layer_norm.*or the same vector"):
            self.open(tmp_path)
        del saved["llama"][name]
        torch.save(saved, file)
        with pytest.raises(WeightsError, match=r"model\.1\.pt: tensor 'decoder\.layer_norm"):
            self.open(tmp_path)
        file.unlink()
        with pytest.raises(WeightsError, match=r"model\.1\.pt is missing"):
            self.open(tmp_path)


class TestQWen(RelaidLlama):
    published = "QWenLMHeadModel"
    keys: ClassVar[dict[str, str]] = {
        "head_dim": "kv_channels",
        "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "seq_length",
    }
    spells: ClassVar[dict[str, str]] = {
        r"model\.embed_tokens": "transformer.wte",
        r"model\.layers": "transformer.h",
        r"model\.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        r"self_attn\.o_proj": "attn.c_proj",
        "self_attn": "attn",
        "gate_proj": "w2",
        "up_proj": "w1",
        "down_proj": "c_proj",
    }

    def hf_class(self) -> Any:
        from transformers import Qwen2ForCausalLM

        return Qwen2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen2Config

        own = {"num_key_value_heads": 4, "rope_theta": 500.0}
        return Qwen2Config(**{**TINY, **own, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        spelled = {self.keys.get(key, key): value for key, value in config.items()}
        for key in ("num_key_value_heads", "rope_parameters", "layer_types", "hidden_act"):
            del spelled[key]
        own = {"intermediate_size": 200, "kv_channels": 18, "rotary_emb_base": 500.0,
               "rotary_pct": 1.0, "no_bias": True, "model_type": "qwen"}  # fmt: skip
        return {**spelled, **own}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().tensors_of(fused(tensors, QKV, "c_attn"))


class TestMiMo(RelaidLlama):
    without_adapters = ("mtp_layers",)
    published = "MiMoForCausalLM"

    def hf_class(self) -> Any:
        from transformers import Qwen2ForCausalLM

        return Qwen2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(**{**TINY, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "num_nextn_predict_layers": 1, "model_type": "mimo"}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, "model.mtp_layers.0.input_proj.weight": torch.ones((72, 144))}


class TestChatGLM(RelaidConformance):
    published = "ChatGLMModel"
    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import GlmForCausalLM

        return GlmForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GlmConfig

        own = {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": False,
               "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                   "partial_rotary_factor": 0.5}}  # fmt: skip
        return GlmConfig(**{**TINY, **own, **overrides})

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "padded_vocab_size": 131, "hidden_size": 72, "ffn_hidden_size": 100, "num_layers": 3,
            "num_attention_heads": 4, "kv_channels": 20, "multi_query_attention": True,
            "multi_query_group_num": 2, "layernorm_epsilon": 1e-5, "rmsnorm": True, "seq_length": 128,
            "rope_ratio": 0.05, "add_qkv_bias": True, "add_bias_linear": False, "model_type": "chatglm",
            "tie_word_embeddings": False, "eos_token_id": 2,
        }  # fmt: skip

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = fused(tensors, QKV, "query_key_value")
        spells = {
            r"model\.embed_tokens": "transformer.embedding.word_embeddings",
            r"model\.layers": "transformer.encoder.layers",
            r"model\.norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
            "self_attn": "self_attention",
            "o_proj": "dense",
            "gate_up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
        }
        out = {"transformer.rotary_pos_emb.inv_freq": torch.ones(5)}
        for name, tensor in tensors.items():
            for pattern, own in spells.items():
                name = re.sub(pattern, own, name)
            out[name] = tensor
        return out

    @pytest.mark.parametrize("asked", [{"position_encoding_2d": True}, {"pre_seq_len": 128}])
    def test_what_it_does_not_do(self, checkpoint: Checkpoint, asked: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedModel, match=next(iter(asked))):
            self.open(checkpoint.path, hf_overrides=asked)

    def test_it_generates_in_spite_of_its_name(self, checkpoint: Checkpoint) -> None:
        assert self.resolve(checkpoint.path).runner == "generate"

    def test_the_other_name(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        checkpoint.reference.save_pretrained(tmp_path)
        rewrite(tmp_path, architectures=["ChatGLMForConditionalGeneration"])
        check(self, checkpoint, tmp_path)


class TestIQuestCoder(RelaidLlama):
    """Clipped, with windows on the last layer."""

    published = "IQuestCoderForCausalLM"

    def hf_class(self) -> Any:
        from transformers import Qwen2ForCausalLM

        return Qwen2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen2Config

        own = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}
        return Qwen2Config(**{**TINY, **own, **overrides})

    def prepare(self, reference: Any) -> None:
        for layer in reference.model.layers:
            for part in QKV:
                projection = getattr(layer.self_attn, part)
                projection.register_forward_hook(lambda _, __, out: out.clamp(-0.9, 0.9))

    def finish(self, reference: Any) -> None:
        for name, parameter in reference.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.zero_()

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "clip_qkv": 0.9, "model_type": "iquestcoder"}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(".bias")}


def check(suite: FamilyConformance, made: Checkpoint, folder: Path) -> None:
    """A checkpoint that was changed gives what it gave."""
    prompt = suite.prompt(17)
    logits = PagedDriver(suite.open(folder)).step({"a": prompt})
    suite.assert_close(logits, made.logprobs(prompt))


@pytest.mark.parametrize("name", ["AquilaForCausalLM", "AquilaModel", "XverseForCausalLM"])
def test_llama_by_other_names(tmp_path: Path, name: str) -> None:
    suite = TestInternLM()
    made = suite.make_checkpoint(tmp_path)
    rewrite(tmp_path, architectures=[name], attention_bias=True)
    check(suite, made, tmp_path)
