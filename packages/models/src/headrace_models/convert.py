"""Decoders that pool: the class of a family that generates, with a pooler in place of its head.

A family declares nothing for it. Names of its checkpoints load with and without the base model's
prefix (``model.``), a stored language-model head is passed over, and where the model pools in both
directions its attention does without a cache (:func:`headrace_models.layers.attention.self_attention`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.decoder import Decoder
from headrace_models.layers.embedding import Embedding

if TYPE_CHECKING:
    from headrace_core.model import BuildContext, Pooler

HEAD = "head"
"""Target of the rules of a language model's head."""


class PoolingDecoder(Decoder):
    """What a pooling class has in place of its family's head. Comes before the family in the MRO."""

    pooler: Pooler
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"(.*\.)?lm_head\..*": "the head of a language model; a pooling model has none"
    }

    def make_embedding(self, context: BuildContext, prefix: str) -> Embedding:
        name = f"{prefix}{self.embedding_name}"
        return Embedding(context, name, self.settings.integer("vocab_size"), self.hidden_size())

    def make_head(self, context: BuildContext, prefix: str) -> None:
        raise NotImplementedError


@functools.cache
def pooling_class(generating: type[Any]) -> type[PoolingDecoder]:
    """The class that pools as ``generating`` would generate.

    Raises:
        UnsupportedModel: it is no :class:`Decoder`.
    """
    if not issubclass(generating, Decoder):
        raise UnsupportedModel(
            f"{generating.__module__}.{generating.__qualname__} cannot be made to pool: it must derive "
            "from headrace_models.layers.decoder.Decoder, or have a pooler of its own"
        )
    rules = pooling_rules(generating)
    return type(
        generating.__name__.replace("ForCausalLM", "ForPooling"),
        (PoolingDecoder, generating),
        {"weight_rules": rules, "__module__": generating.__module__, "__doc__": generating.__doc__},
    )


def pooling_rules(generating: type[Decoder]) -> Sequence[WeightRule]:
    """The family's rules without the head's, each also without the base model's prefix."""
    base = generating.embedding_name.split(".")[0] + "."
    rules = [rule for rule in generating.weight_rules if rule.target != HEAD]
    known = {rule.source for rule in rules}
    import dataclasses

    bare = [
        dataclasses.replace(rule, source=rule.source.removeprefix(base))
        for rule in rules
        if rule.source.startswith(base) and rule.source.removeprefix(base) not in known
    ]
    return (*rules, *bare)
