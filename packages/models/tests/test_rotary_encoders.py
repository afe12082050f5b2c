"""Rotary encoders against transformers, on tiny configs with odd sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pooling_families_conformance import PoolingFamilyConformance
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint, randomise

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "num_labels": 3,
}


class _ModernBert(PoolingFamilyConformance):
    """Windows of six tokens to either side on two layers of four."""

    prefix: ClassVar[str] = "model."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import ModernBertConfig

        own = {"num_hidden_layers": 4, "local_attention": 12, "pad_token_id": 0, "bos_token_id": 1,
               "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
        return ModernBertConfig(**{**TINY, **own, **overrides})


class TestModernBert(_ModernBert):
    def hf_class(self) -> Any:
        from transformers import ModernBertModel

        return ModernBertModel

    def test_old_config(self, checkpoint: Checkpoint, model: Any, tmp_path: Path) -> None:
        """Bases of the rotation and the pattern of windows had keys of their own."""
        for file in checkpoint.path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        del config["rope_parameters"], config["layer_types"]
        old = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0,
               "global_attn_every_n_layers": 3}  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({**config, **old}))
        prompts = self.prompts()
        for states, other in zip(
            self.hidden(self.open(tmp_path), prompts), self.hidden(model, prompts)
        ):
            assert torch.equal(states, other)


class TestModernBertForSequenceClassification(_ModernBert):
    makes = "labels"

    def hf_class(self) -> Any:
        from transformers import ModernBertForSequenceClassification

        return ModernBertForSequenceClassification


class TestModernBertForSequenceClassificationOfTheMean(TestModernBertForSequenceClassification):
    default_pooling = "MEAN"

    def hf_config(self, **overrides: Any) -> Any:
        own = {"classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True}
        return super().hf_config(**{**own, **overrides})


class TestModernBertForTokenClassification(_ModernBert):
    makes, default_pooling = "token labels", "ALL"

    def hf_class(self) -> Any:
        from transformers import ModernBertForTokenClassification

        return ModernBertForTokenClassification


class TestNomicBert(PoolingFamilyConformance):
    segments: ClassVar[bool] = True
    default_pooling: ClassVar[str] = "MEAN"
    prefix: ClassVar[str] = "nomic_bert."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import NomicBertConfig

        return NomicBertConfig(**{**TINY, **overrides})

    def hf_class(self) -> Any:
        from transformers import NomicBertModel

        return NomicBertModel

    def test_config_spelled_as_gpt2s(
        self, checkpoint: Checkpoint, model: Any, tmp_path: Path
    ) -> None:
        for file in checkpoint.path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(_OLD_NOMIC))
        prompts = self.prompts()
        other = self.open(tmp_path)
        for states, expected in zip(self.hidden(other, prompts), self.hidden(model, prompts)):
            assert torch.equal(states, expected)
        assert self.resolve(tmp_path).max_model_len == 64  # what it was trained for

    @pytest.mark.parametrize("activation", ["glu", 3, {"gelu": 1}])
    def test_activations_are_known(self, checkpoint: Checkpoint, activation: object) -> None:
        with pytest.raises(UnsupportedModel, match="activation_function = "):
            self.open(checkpoint.path, hf_overrides={"activation_function": activation})

    def test_names_of_transformers(
        self, checkpoint: Checkpoint, model: Any, tmp_path: Path
    ) -> None:
        check_names_of_transformers(self, checkpoint, model, tmp_path)


class _Experts(torch.nn.Module):
    """What stands in a layer of nomic-embed-text-v2-moe, row by row."""

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(hidden, experts, bias=False)
        self.w1 = torch.nn.Parameter(torch.empty(experts * inner, hidden))
        self.w2 = torch.nn.Parameter(torch.empty(experts * inner, hidden))
        self.bias = torch.nn.Parameter(torch.empty(hidden))
        self.shape = (experts, inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        ups, downs = self.w1.view(self.shape), self.w2.view(self.shape)
        rows = []
        for row in x.flatten(0, -2):
            out = self.bias
            for weight, expert in zip(*self.layer(row).softmax(-1).topk(2)):
                out = out + weight * (functional.gelu(ups[expert] @ row) @ downs[expert])
            rows.append(out)
        return torch.stack(rows).view_as(x)


class TestNomicBertWithExperts(PoolingFamilyConformance):
    """transformers has none: its layers get other MLPs and biases here."""

    in_layers = "self_attn"

    default_pooling: ClassVar[str] = "MEAN"
    a_matrix: ClassVar[str] = ".1.mlp.router"

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import NomicBertConfig

        return NomicBertConfig(**{**TINY, "type_vocab_size": 1, **overrides})

    def hf_class(self) -> Any:
        from transformers import NomicBertModel

        return NomicBertModel

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        reference = self.hf_class()(self.hf_config(**overrides)).eval()
        for index, layer in enumerate(reference.layers):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, torch.nn.Linear(48, 48))
            plain = (torch.nn.Linear(48, 52), torch.nn.GELU(), torch.nn.Linear(52, 48))
            layer.mlp = _Experts(48, 52, 5) if index % 2 else torch.nn.Sequential(*plain)
        randomise(reference, seed)
        own = {
            **_OLD_NOMIC,
            "activation_function": "gelu",
            "moe_every_n_layers": 2,
            "moe_top_k": 2,
            "num_experts": 5,
            "type_vocab_size": 1,
            **dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias"), True),
            **dict.fromkeys(("expert_choice_router", "moe_normalize_expert_weights"), False),
        }
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(own))
        save_file(_own_names(reference.state_dict()), folder / "model.safetensors")
        return Checkpoint(reference, folder)

    def test_more_experts_for_a_token_than_there_are(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="moe_top_k = 6: must be at most 5"):
            self.open(checkpoint.path, hf_overrides={"moe_top_k": 6})

    @pytest.mark.parametrize("name", ["moe_normalize_expert_weights", "expert_choice_router"])
    def test_other_ways_to_choose_are_refused(self, checkpoint: Checkpoint, name: str) -> None:
        with pytest.raises(UnsupportedModel, match=f"{name} = True: must be False"):
            self.open(checkpoint.path, hf_overrides={name: True})


def _own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of transformers' tensors, with :class:`_Experts` among them, the names of its authors."""
    names = {
        "embeddings.LayerNorm": "emb_ln", "layers.": "encoder.layers.", "self_attn.": "attn.",
        "o_proj": "out_proj", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
        "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2", "mlp.layer": "mlp.router.layer",
        "mlp.w": "mlp.experts.mlp.w", "mlp.bias": "mlp.experts.bias",
    }  # fmt: skip
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "inv_freq" in name or name.endswith("position_ids"):
            continue
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = tensor.contiguous()
    for name in [name for name in found if ".q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        found[name.replace("q_proj", "Wqkv")] = torch.cat(parts)
    return found


_OLD_NOMIC = {
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 64,
    "n_embd": 48,
    "n_head": 4,
    "n_inner": 52,
    "n_layer": 3,
    "n_positions": 80,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "type_vocab_size": 2,
    "vocab_size": 131,
}


class _Gte(PoolingFamilyConformance):
    """Many segments, as no published checkpoint has, so that they matter."""

    segments: ClassVar[bool] = True
    prefix: ClassVar[str] = "new."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GteConfig

        return GteConfig(**{**TINY, "type_vocab_size": 2, **overrides})


class TestGte(_Gte):
    def hf_class(self) -> Any:
        from transformers import GteModel

        return GteModel

    def test_names_of_transformers(
        self, checkpoint: Checkpoint, model: Any, tmp_path: Path
    ) -> None:
        check_names_of_transformers(self, checkpoint, model, tmp_path)

    def test_the_name_that_several_models_have(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="hf_overrides"):
            self.resolve(checkpoint.path, hf_overrides={"architectures": ["NewModel"]})
        info = self.resolve(checkpoint.path, hf_overrides={"architectures": ["GteNewModel"]})
        assert info.tasks == ("embed", "token_embed")


class TestGteOfOneSegment(_Gte):
    segments: ClassVar[bool] = False

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{"type_vocab_size": 1, **overrides})

    def hf_class(self) -> Any:
        from transformers import GteModel

        return GteModel


class TestGteForSequenceClassification(_Gte):
    makes = "labels"
    prefix = "gte."

    def hf_class(self) -> Any:
        from transformers import GteForSequenceClassification

        return GteForSequenceClassification


class _JinaV3(PoolingFamilyConformance):
    default_pooling: ClassVar[str] = "MEAN"
    prefix: ClassVar[str] = "roberta."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import JinaEmbeddingsV3Config

        return JinaEmbeddingsV3Config(**{**TINY, "pad_token_id": 1, **overrides})


class TestJinaV3(_JinaV3):
    def hf_class(self) -> Any:
        from transformers import JinaEmbeddingsV3Model

        return JinaEmbeddingsV3Model

    def test_names_of_transformers(
        self, checkpoint: Checkpoint, model: Any, tmp_path: Path
    ) -> None:
        check_names_of_transformers(self, checkpoint, model, tmp_path)


class TestJinaV3ForSequenceClassification(_JinaV3):
    makes, default_pooling = "labels", "CLS"

    def hf_class(self) -> Any:
        from transformers import JinaEmbeddingsV3ForSequenceClassification

        return JinaEmbeddingsV3ForSequenceClassification


def check_names_of_transformers(
    suite: PoolingFamilyConformance, checkpoint: Checkpoint, model: Any, folder: Path
) -> None:
    """``save_pretrained`` writes the names of the first repositories; transformers' own load, too."""
    for file in checkpoint.path.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    own = {name: x.contiguous() for name, x in checkpoint.reference.state_dict().items()}
    assert set(own) != set(load_file(checkpoint.path / "model.safetensors"))
    save_file(own, folder / "model.safetensors")
    prompts = suite.prompts()
    other = suite.open(folder)
    for states, expected in zip(suite.hidden(other, prompts), suite.hidden(model, prompts)):
        assert torch.equal(states, expected)
