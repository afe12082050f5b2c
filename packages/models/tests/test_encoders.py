"""Every encoder of BERT's line against transformers, on tiny configs with odd sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pooling_families_conformance import PoolingFamilyConformance
from torch import Tensor

from headrace_testing.model.decoders import Checkpoint

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}


class _Bert(PoolingFamilyConformance):
    segments: ClassVar[bool] = True
    prefix: ClassVar[str] = "bert."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import BertConfig

        return BertConfig(**{**TINY, "num_labels": 3, **overrides})


class TestBert(_Bert):
    def hf_class(self) -> Any:
        from transformers import BertModel

        return BertModel


class TestBertForSequenceClassification(_Bert):
    makes = "labels"

    def hf_class(self) -> Any:
        from transformers import BertForSequenceClassification

        return BertForSequenceClassification


class TestBertForTokenClassification(_Bert):
    makes, default_pooling = "token labels", "ALL"

    def hf_class(self) -> Any:
        from transformers import BertForTokenClassification

        return BertForTokenClassification


class _Roberta(PoolingFamilyConformance):
    """One segment, as its checkpoints have."""

    prefix: ClassVar[str] = "roberta."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import RobertaConfig

        own = {"type_vocab_size": 1, "pad_token_id": 1, "num_labels": 3, "layer_norm_eps": 1e-5}
        return RobertaConfig(**{**TINY, **own, **overrides})


class TestRoberta(_Roberta):
    def hf_class(self) -> Any:
        from transformers import RobertaModel

        return RobertaModel


class TestRobertaForSequenceClassification(_Roberta):
    makes = "labels"

    def hf_class(self) -> Any:
        from transformers import RobertaForSequenceClassification

        return RobertaForSequenceClassification


class TestRobertaForTokenClassification(_Roberta):
    makes, default_pooling = "token labels", "ALL"

    def hf_class(self) -> Any:
        from transformers import RobertaForTokenClassification

        return RobertaForTokenClassification


class TestRobertaForMaskedLM(_Roberta):
    """The head that guesses words is passed over."""

    def hf_class(self) -> Any:
        from transformers import RobertaForMaskedLM

        return RobertaForMaskedLM

    def expected(
        self, checkpoint: Checkpoint, prompt: Sequence[int], num_keys: int | None = None
    ) -> Tensor:
        encoder = Checkpoint(checkpoint.reference.roberta, checkpoint.path)
        return super().expected(encoder, prompt, num_keys)


class TestXLMRoberta(TestRoberta):
    def hf_config(self, **overrides: Any) -> Any:
        from transformers import XLMRobertaConfig

        own = {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
        return XLMRobertaConfig(**{**TINY, **own, **overrides})

    def hf_class(self) -> Any:
        from transformers import XLMRobertaModel

        return XLMRobertaModel


class TestXLMRobertaForSequenceClassification(_Roberta):
    makes = "labels"

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import XLMRobertaConfig

        own = {"type_vocab_size": 1, "pad_token_id": 1, "num_labels": 3}
        return XLMRobertaConfig(**{**TINY, **own, **overrides})

    def hf_class(self) -> Any:
        from transformers import XLMRobertaForSequenceClassification

        return XLMRobertaForSequenceClassification


class TestCamembertForSequenceClassification(_Roberta):
    makes = "labels"

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import CamembertConfig

        own = {"type_vocab_size": 1, "pad_token_id": 1, "num_labels": 3}
        return CamembertConfig(**{**TINY, **own, **overrides})

    def hf_class(self) -> Any:
        from transformers import CamembertForSequenceClassification

        return CamembertForSequenceClassification


class _DistilBert(PoolingFamilyConformance):
    prefix: ClassVar[str] = "distilbert."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DistilBertConfig

        own = {"vocab_size": 131, "dim": 36, "hidden_dim": 52, "n_layers": 3, "n_heads": 4,
               "max_position_embeddings": 80, "num_labels": 3}  # fmt: skip
        return DistilBertConfig(**{**own, **overrides})


class TestDistilBert(_DistilBert):
    def hf_class(self) -> Any:
        from transformers import DistilBertModel

        return DistilBertModel


class TestDistilBertForSequenceClassification(_DistilBert):
    makes = "labels"

    def hf_class(self) -> Any:
        from transformers import DistilBertForSequenceClassification

        return DistilBertForSequenceClassification


class TestDistilBertForTokenClassification(_DistilBert):
    makes, default_pooling = "token labels", "ALL"

    def hf_class(self) -> Any:
        from transformers import DistilBertForTokenClassification

        return DistilBertForTokenClassification


class _MPNet(PoolingFamilyConformance):
    """Its longest prompts have distances that share a range."""

    prefix: ClassVar[str] = "mpnet."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MPNetConfig

        own = {"pad_token_id": 1, "num_labels": 3}
        return MPNetConfig(**{**TINY, **own, **overrides})


class TestMPNet(_MPNet):
    def hf_class(self) -> Any:
        from transformers import MPNetModel

        return MPNetModel


class TestMPNetForSequenceClassification(_MPNet):
    makes = "labels"

    def hf_class(self) -> Any:
        from transformers import MPNetForSequenceClassification

        return MPNetForSequenceClassification


class TestMPNetForTokenClassification(_MPNet):
    makes, default_pooling = "token labels", "ALL"

    def hf_class(self) -> Any:
        from transformers import MPNetForTokenClassification

        return MPNetForTokenClassification


class _Electra(PoolingFamilyConformance):
    """Embeddings narrower than the blocks."""

    segments: ClassVar[bool] = True
    prefix: ClassVar[str] = "electra."

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import ElectraConfig

        return ElectraConfig(**{**TINY, "embedding_size": 20, "num_labels": 3, **overrides})


class TestElectra(_Electra):
    def hf_class(self) -> Any:
        from transformers import ElectraModel

        return ElectraModel


class TestElectraForSequenceClassification(_Electra):
    makes = "labels"

    def hf_class(self) -> Any:
        from transformers import ElectraForSequenceClassification

        return ElectraForSequenceClassification


class TestElectraForTokenClassification(_Electra):
    makes, default_pooling = "token labels", "ALL"

    def hf_class(self) -> Any:
        from transformers import ElectraForTokenClassification

        return ElectraForTokenClassification
