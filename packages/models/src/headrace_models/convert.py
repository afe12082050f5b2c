"""Decoders that pool: the class of a family that generates, with a pooler in place of its head.

A family declares nothing for it. Names of its checkpoints load with and without the base model's
prefix (``model.``), a stored head of the language model is passed over, and where the model pools in
both directions its attention does without a cache.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core import plugins
from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.architectures import generates, served_by
from headrace_models.catalogue.multimodal import WRAPPERS, text_architecture
from headrace_models.checkpoint.vocabulary import token_ids
from headrace_models.layers.decoder import Decoder
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.vocabulary import vocab_shard
from headrace_models.pooling.classifier import Classifier, HeadLinear
from headrace_models.pooling.head_rows import HeadRows
from headrace_models.pooling.pair_forms import PAIR_FORMS
from headrace_models.pooling.pooler import make_pooler
from headrace_models.reranker import TokenClassifier, token_classifier
from headrace_models.text_part import text_of

if TYPE_CHECKING:
    from headrace_core.model import BuildContext, ModelInfo, Pooler

OUT = "pooler.head.classifier.out"
"""Target of the rules of a classifier's last layer."""


def model_class(info: ModelInfo) -> type[Any]:
    """Class that is built for a checkpoint: that of its architecture, or what that becomes to pool.

    Raises:
        UnsupportedModel: it cannot be made to pool.
    """
    if info.source == "transformers":
        return _of_transformers(info)
    known = plugins.installed("headrace.models")
    architecture = text_architecture(info.architecture, info.whole_config)
    own: type[Any] = plugins.load("headrace.models", served_by(architecture, known) or architecture)
    if architecture != info.architecture:
        wrapper = WRAPPERS[info.architecture]
        tower = wrapper.tower_of(info.whole_config) if info.processor else None
        if tower is None and wrapper.needs_media:
            raise UnsupportedModel(
                f"model {info.name!r}: {info.architecture}: {wrapper.needs_media}, and it can bring none: "
                "limit_mm_per_prompt.image is 0, headrace-multimodal is not installed, or its "
                "vision_config.model_type is not served"
            )
        own = text_of(own, wrapper, tower, has_towers=info.has_towers)
    if info.convert == "none":
        return own
    assert info.pooling is not None
    if info.pooling.pooling_type == "STEP" and generates(info.architecture):
        return pooling_class(own, StepDecoder)
    if info.architecture in PAIR_FORMS and info.convert == "classify":
        return pooling_class(own, TwoLayerScorer)
    return pooling_class(own)


def _of_transformers(info: ModelInfo) -> type[Any]:
    from headrace_models.transformers_backend import image_model, library, model

    if info.pooling is not None:
        return model.TransformersForPooling
    if library.takes_images(info.architecture):
        return image_model.class_for(info)
    return model.TransformersForCausalLM


class PoolingDecoder(Decoder):
    """Mixin of a pooling class in place of its family's head. It comes before the family in the MRO."""

    pooler: Pooler
    head_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("score", OUT),
        WeightRule("classifier", OUT),
        WeightRule("lm_head.weight", f"{OUT}.table"),
    )
    """The last is for classifiers made of the language model's head."""

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`: the family's own, and heads."""
        head = "the head of a language model; this one pools"
        return {
            r"(.*\.)?lm_head\..*": head,
            r"(score|classifier)\..*": "labels, of a checkpoint that is to embed",
            **getattr(super(), "ignored_weights", {}),
            rf"{re.escape(self.head_name)}\..*": head,
        }

    def make_embedding(self, context: BuildContext, prefix: str) -> Embedding:
        vocab = self.settings.integer("vocab_size")
        # A classifier may be made of the table's rows, as of a head's.
        reads_rows = self.is_tied() and context.pooling is not None and context.pooling.num_labels
        return Embedding(
            context,
            f"{prefix}{self.embedding_name}",
            vocab,
            self.embedding_size(),
            shard=None if reads_rows else vocab_shard(vocab, context.communicator),
        )

    def make_head(self, context: BuildContext, prefix: str) -> None:
        assert context.pooling is not None
        classifier = self.make_classifier(context, prefix) if context.pooling.num_labels else None
        self.pooler = make_pooler(context, classifier)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier:
        """A linear layer, of the checkpoint's own or of the language model's rows."""
        assert context.pooling is not None
        by_token = token_classifier(context.config)
        if by_token is not None:
            return Classifier(self.make_token_rows(context, prefix, by_token))
        size, labels = self.hidden_size(), context.pooling.num_labels
        return Classifier(HeadLinear(context, f"{prefix}score", size, labels, bias=None))

    def make_token_rows(
        self, context: BuildContext, prefix: str, wanted: TokenClassifier
    ) -> HeadRows:
        if context.path is None:
            raise UnsupportedModel("classifier_from_token: the checkpoint's folder is not known")
        ids = token_ids(context.path, wanted.tokens, setting="classifier_from_token")
        vocab = self.settings.integer("vocab_size")
        if max(ids) >= vocab:
            raise UnsupportedModel(
                f"classifier_from_token = {max(ids)}: must be below vocab_size = {vocab}"
            )
        return self.make_rows(context, prefix, ids, difference=wanted.difference)

    def make_rows(
        self,
        context: BuildContext,
        prefix: str,
        ids: Sequence[int] | None,
        *,
        difference: bool = False,
    ) -> HeadRows:
        table = self.embed
        assert isinstance(table, Embedding)
        return HeadRows(
            context,
            f"{prefix}lm_head",
            self.hidden_size(),
            self.settings.integer("vocab_size"),
            ids,
            difference=difference,
            tied=(lambda: table.weight) if self.is_tied() else None,
        )


class StepDecoder(PoolingDecoder):
    """Judges steps of reasoning by the language model's own logits, of a few tokens, where a step ends
    (Wang et al. 2023, "Math-Shepherd", arXiv:2312.08935)."""

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier:
        return Classifier(self.make_rows(context, prefix, None))


class TwoLayerScorer(PoolingDecoder):
    """Scores by two layers with a ReLU between them, ``score.0`` and ``score.2`` (jina-reranker-m0)."""

    head_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("score.0", "pooler.head.classifier.dense"),
        WeightRule("score.2", OUT),
    )

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier:
        size = self.hidden_size()
        return Classifier(
            HeadLinear(context, f"{prefix}score.2", size, 1),
            HeadLinear(context, f"{prefix}score.0", size, size),
            torch.relu,
        )


def pooling_class(generating: type[Any], adapter: type[Any] | None = None) -> type[Any]:
    """The class that pools as ``generating`` would generate.

    Args:
        adapter: what comes before it in the MRO; default: :class:`PoolingDecoder`.

    Raises:
        UnsupportedModel: it is no :class:`Decoder`.
    """
    if not issubclass(generating, Decoder):
        raise UnsupportedModel(
            f"{generating.__module__}.{generating.__qualname__} cannot be made to pool: it must derive "
            "from headrace_models.layers.decoder.Decoder, or have a pooler and pooling_traits of its "
            "own"
        )
    adapter = adapter or PoolingDecoder
    name = generating.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    members = {
        "weight_rules": (*pooling_rules(generating), *adapter.head_rules),
        "__module__": generating.__module__,
        "__doc__": f"{generating.__name__}, made to pool.",
    }
    return type(f"{name}{adapter.__name__}", (adapter, generating), members)


def pooling_rules(generating: type[Decoder]) -> list[WeightRule]:
    """The family's rules without the head's, each also without the base model's prefix."""
    base = generating.embedding_name.partition(".")[0] + "."
    own = [rule for rule in generating.weight_rules if rule.target != "head"]
    bare = [dataclasses.replace(rule, source=rule.source.removeprefix(base)) for rule in own]
    return list(dict.fromkeys((*own, *bare)))
