"""Base of all decoders of text: embedding, a stack of blocks, a final norm, a head."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from headrace_core.errors import UnsupportedModel
from headrace_core.linear import LinearSpec
from headrace_core.model import INPUT_EMBEDS
from headrace_models.architectures import is_bidirectional
from headrace_models.config.settings import MAX_LAYERS, Settings, Spelling
from headrace_models.layers.attention.self_attention import Attention, CachedLayer
from headrace_models.layers.base import Layer, Part, walk
from headrace_models.layers.decoders.unheard_tokens import ShortHead
from headrace_models.layers.embedding import (
    Embedding,
    PackedEmbedding,
    QuantizedEmbedding,
    QuantizedTableHead,
    Table,
)
from headrace_models.layers.linear import (
    Linear,
    QuantizedTiedLinear,
    TiedLinear,
    quantizes_floats,
)
from headrace_models.layers.norm import NoNorm, NormLayer, RMSNorm
from headrace_models.layers.recurrent.state_layer import RecurrentLayer
from headrace_models.layers.vocabulary import (
    VocabShard,
    fitting_shard,
    gathered_logits,
    vocab_shard,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.linear import LinearMethod
    from headrace_core.model import (
        AttentionLayer,
        BuildContext,
        InputEmbeds,
        StateLayer,
        WeightRule,
    )

logger = logging.getLogger(__name__)


class Norm(Protocol):
    """:class:`RMSNorm` or :class:`LayerNorm`."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]: ...


class Block(Layer, ABC):
    """One layer of the stack."""

    @abstractmethod
    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, H] is what the block before added to the residual [T, H] (None: nothing yet).

        The sum of both is the stream; handing it on in two terms lets each norm add them in the
        same pass.
        """


class Decoder(Layer, ABC):
    """A causal language model; families say what differs.

    Args:
        prefix: of the checkpoint's names, if the model is part of another.
    """

    weight_rules: ClassVar[Sequence[WeightRule]]
    module_names: ClassVar[Sequence[tuple[str, str]]] = ()
    """Regular expression of names of modules of transformers' class -> what files have in its place, where
    the two differ: adapters have the former."""
    ties_embeddings: ClassVar[bool] = False
    """The family's default for a config without ``tie_word_embeddings``."""
    embedding_name: ClassVar[str] = "model.embed_tokens"
    blocks_name: ClassVar[str] = "model.layers"
    head_name: ClassVar[str] = "lm_head"
    head_bias: ClassVar[bool] = False
    head_shard: VocabShard | None = None
    """Tokens whose logits this rank's head computes; None: all."""
    no_stages: str = ""
    """Why the layers cannot be on several stages, where it is not seen from the built model."""
    spelling: ClassVar[Spelling] = {}
    """See :class:`~headrace_models.config.settings.Settings`."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        self.context = context
        self.settings = Settings(context.config, self.spelling)
        if context.pooling is None and is_bidirectional("", context.config):
            raise UnsupportedModel(
                "config.json: the model attends in both directions, so it generates nothing: set "
                "--runner pooling"
            )
        self.embed: Table = self.make_embedding(context, prefix)
        self.prepare(context, prefix)
        self.layers = [
            self.make_block(context, index, f"{prefix}{self.blocks_name}.{index}")
            for index in range(self.num_layers())
        ]
        self.final_norm: NormLayer | NoNorm = self.make_final_norm(context, prefix)
        self.logits_scale = self.logits_multiplier()
        self.logits_cap = self.logits_soft_cap()
        self.make_head(context, prefix)
        self._share_caches()
        if context.pooling is not None and not context.pooling.causal:
            self._check_directions()

    def _check_directions(self) -> None:
        """Raises: UnsupportedModel: a layer cannot attend in both directions."""
        named = [*self.attention_layers(), *self.state_layers()]
        if named:
            raise UnsupportedModel(
                f"{named[0]} is causal: the model pools with causal attention only"
            )

    def _share_caches(self) -> None:
        layers = {x.spec.name: x for _, x in walk(self) if isinstance(x, Attention)}
        for layer in layers.values():
            if layer.spec.kv_sharing_target is not None:
                layer.share(layers[layer.spec.kv_sharing_target])

    def make_embedding(self, context: BuildContext, prefix: str) -> Table:
        """The table of input vectors; packed for the head if that multiplies with it."""
        spec = self.head_spec(prefix)
        stored = replace(spec, name=f"{prefix}{self.embedding_name}", bias=False)
        method = context.quant.for_table(stored)
        if method is not None:
            return _quantized_table(context, stored, method)
        shared = self.is_tied() and not quantizes_floats(context.quant.for_layer(spec), spec)
        vocab = self.settings.integer("vocab_size")
        return (PackedEmbedding if shared else Embedding)(
            context,
            f"{prefix}{self.embedding_name}",
            vocab,
            self.embedding_size(),
            shard=vocab_shard(vocab, context.communicator),
        )

    def make_head(self, context: BuildContext, prefix: str) -> None:
        """Make what stands behind the final norm: ``head``, from hidden states to logits."""
        spec, table = self.head_spec(prefix), self.embed
        self.head: Linear | TiedLinear | QuantizedTiedLinear | QuantizedTableHead | ShortHead
        if not self.is_tied() and not isinstance(table, PackedEmbedding):
            self.head, self.head_shard = self.make_untied_head(context, spec)
            return
        shard = self.head_shard = table.shard
        part = Part(spec.out_features) if shard is None else shard.part
        own = replace(spec, out_parts=(part.size,))
        if isinstance(table, PackedEmbedding):
            self.head = TiedLinear(context, own, table.weight, part)
        elif isinstance(table, QuantizedEmbedding):
            self.head = QuantizedTableHead(own, table.method, lambda: table.state, part)
        else:
            method = context.quant.for_layer(own)
            self.head = QuantizedTiedLinear(own, method, lambda: table.weight, part)

    def make_untied_head(
        self, context: BuildContext, spec: LinearSpec
    ) -> tuple[Linear, VocabShard | None]:
        """A head with a weight of its own, and the tokens of it that this rank has (None: all).

        Whole if its tensors can be divided in no way (blocks of quantized weights).
        """
        shard = fitting_shard(spec, context.communicator, context.quant.for_layer)
        part = Part(spec.out_features) if shard is None else shard.part
        made = self.head_class()(context, spec.name, spec.in_features, [part], bias=spec.bias)
        return made, shard

    def head_class(self) -> type[Linear]:
        """Class of a head with a weight of its own."""
        return Linear

    def head_spec(self, prefix: str) -> LinearSpec:
        vocab = self.settings.integer("vocab_size")
        return LinearSpec(
            f"{prefix}{self.head_name}",
            self.embedding_size(),
            (vocab,),
            self.context.dtype,
            bias=self.has_head_bias(),
        )

    def is_tied(self) -> bool:
        """True if the head is the table of input vectors."""
        return self.settings.flag("tie_word_embeddings", self.ties_embeddings)

    def has_head_bias(self) -> bool:
        return self.head_bias

    def hidden_size(self) -> int:
        return self.settings.integer("hidden_size")

    def embedding_size(self) -> int:
        """Size of the table's rows, and of what the head reads."""
        return self.hidden_size()

    def num_layers(self) -> int:
        return self.settings.integer("num_hidden_layers", maximum=MAX_LAYERS)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        """Make what the blocks share (rotary tables), before the first one."""

    @abstractmethod
    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        """The stack's layer ``index``; ``name`` as the checkpoint spells it."""

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer | NoNorm:
        eps = self.settings.number("rms_norm_eps", 1e-6)
        return RMSNorm(context, f"{prefix}model.norm", self.hidden_size(), eps)

    def logits_multiplier(self) -> float:
        """Number that the head's results are multiplied by."""
        return 1.0

    def logits_soft_cap(self) -> float | None:
        """Bound within which tanh keeps the logits; None: it does not."""
        return self.settings.optional_positive("final_logit_softcapping")

    def token_vectors(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, H]: the table's rows, scaled if the family does that."""
        return self.embed(ids)

    def input_vectors(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPromptEmbeds`."""
        vectors = self.token_vectors(batch.input_ids)
        given: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if given is None:
            return vectors
        return vectors.index_copy(0, given.rows, given.values)

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        """[T, H]: what the first block gets."""
        return self.input_vectors(batch)

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        """See :class:`headrace_core.model.CausalLM`."""
        found = (layer for _, layer in walk(self) if isinstance(layer, CachedLayer))
        return {layer.spec.name: layer for layer in found}

    def state_layers(self) -> Mapping[str, StateLayer]:
        """See :class:`headrace_core.model.SupportsRecurrence`."""
        found = (layer for _, layer in walk(self) if isinstance(layer, RecurrentLayer))
        return {layer.name: layer for layer in found}

    @property
    def vocabulary_passes(self) -> Sequence[str]:
        """See :class:`headrace_core.model.DividesVocabulary`."""
        divided = {"token_vectors": self.embed.shard, "compute_logits": self.head_shard}
        return [name for name, shard in divided.items() if shard is not None]

    def prepare_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with what all layers need of it besides, made once for a pass."""
        return batch

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.CausalLM`."""
        batch = self.prepare_batch(batch)
        x, residual = self.run_blocks(self.embed_tokens(batch), batch)
        return self.finish(*self.wanted_rows(x, residual, batch))

    def wanted_rows(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """The rows of the stream that a pass returns: norms work by row, so the others need none."""
        if batch.logits_rows is None:
            return x, residual
        rows, select = batch.logits_rows, self.context.ops.embedding
        return select(rows, x), None if residual is None else select(rows, residual)

    def finish(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """[R, H]: hidden states of the whole stream."""
        hidden, _ = self.final_norm.add(x, residual)
        return hidden

    @classmethod
    def runs_in_stages(cls) -> bool:
        """True if layers of such a model can be on several stages; a checkpoint's may still need each other
        (:func:`headrace_models.stages.cut.why_whole`)."""
        own = (cls.run_blocks, cls.forward)
        return not cls.no_stages and own == (Decoder.run_blocks, Decoder.forward)

    @property
    def num_streams(self) -> int:
        """See :class:`headrace_core.speculation.ShowsStreams`."""
        own = ("run_blocks", "run_layer", "prepare_batch", "forward")
        shown = all(getattr(type(self), name) is getattr(Decoder, name) for name in own)
        return len(self.layers) + 1 if shown else 0

    def forward_streams(
        self, batch: ForwardBatch, layers: Sequence[int]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """See :class:`headrace_core.speculation.ShowsStreams`."""
        streams: dict[int, Tensor] = {}
        x, residual = self.embed_tokens(batch), None
        for index, layer in enumerate([*self.layers, None]):
            if index in layers:  # a sum of its own: norms write where their inputs are
                streams[index] = x.clone() if residual is None else x + residual
            if layer is not None:
                x, residual = layer(x, residual, batch)
        return self.finish(x, residual), [streams[index] for index in layers]

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The stack: [T, H] -> the stream in two terms, see :class:`Block`."""
        residual: Tensor | None = None
        for index in range(len(self.layers)):
            x, residual = self.run_layer(index, x, residual, batch)
        return x, residual

    def run_layer(
        self, index: int, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """One layer of the stack, and what the family does behind it."""
        return self.layers[index](x, residual, batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See :class:`headrace_core.model.CausalLM`."""
        logits = self.head(hidden)
        if self.head_shard is not None:
            context = self.context
            logits = gathered_logits(logits, self.head_shard, context.ops, context.communicator)
        if self.logits_scale != 1.0:
            logits = self.context.ops.scale(logits, self.logits_scale)
        if self.logits_cap is None:
            return logits
        return self.context.ops.to_float32(logits, soft_cap=self.logits_cap)


def _quantized_table(
    context: BuildContext, spec: LinearSpec, method: LinearMethod
) -> QuantizedEmbedding:
    """A table that stays quantized; whole if its tensors can be divided in no way."""
    shard = fitting_shard(spec, context.communicator, lambda own: method)
    own = spec if shard is None else replace(spec, out_parts=(shard.size,))
    return QuantizedEmbedding(context, own, method, shard)
