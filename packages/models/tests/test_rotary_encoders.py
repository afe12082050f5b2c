"""Rotary encoders against transformers, on tiny configs with odd sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pooling_families_conformance import PoolingFamilyConformance

from headrace_core.errors import UnsupportedModel
from headrace_core.testing.model import Checkpoint

pytestmark = pytest.mark.spec("MODEL-POOL-TEXT")

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

    def test_mixture_of_experts_is_refused(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="num_experts = 8"):
            self.open(checkpoint.path, hf_overrides={"num_experts": 8})

    def test_names_of_transformers(
        self, checkpoint: Checkpoint, model: Any, tmp_path: Path
    ) -> None:
        check_names_of_transformers(self, checkpoint, model, tmp_path)


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
    from safetensors.torch import load_file, save_file

    for file in checkpoint.path.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    own = {name: x.contiguous() for name, x in checkpoint.reference.state_dict().items()}
    assert set(own) != set(load_file(checkpoint.path / "model.safetensors"))
    save_file(own, folder / "model.safetensors")
    prompts = suite.prompts()
    other = suite.open(folder)
    for states, expected in zip(suite.hidden(other, prompts), suite.hidden(model, prompts)):
        assert torch.equal(states, expected)
