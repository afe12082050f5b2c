"""Model that transformers' code runs, as the engine sees it.

Letters: T tokens, R rows whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.pooling.classifier import Classifier
from headrace_models.pooling.heads import ClassificationHead, EmbeddingHead
from headrace_models.pooling.pooler import TaskPooler
from headrace_models.transformers_backend import attention, attention_probe, classes, weight_modules
from headrace_models.transformers_backend.attention import (
    LAYERS,
    STEP,
    EncoderLayer,
    PagedLayer,
    Step,
)
from headrace_models.transformers_backend.functions import WithFunctions
from headrace_models.transformers_backend.graph_capture import unchanged_by_recording
from headrace_models.transformers_backend.library import read_config, text_config, transformers
from headrace_models.transformers_backend.names import CheckpointNames, Stored
from headrace_models.transformers_backend.patch_modules import ModulePatcher
from headrace_models.transformers_backend.plan import TensorParallelPlan
from headrace_models.transformers_backend.rotary import tabulate_rotary
from headrace_models.transformers_backend.skeleton import freeze_rotary, make_tree

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import AttentionLayer, BuildContext, WeightRule

ATTENTION, PROBE = "headrace", "headrace_probe"
"""Names in transformers' registries, of what serves and of what tries a model."""


def register() -> None:
    """Make headrace's functions known to transformers. Does nothing the second time."""
    transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention.attend)
    ALL_ATTENTION_FUNCTIONS.register(PROBE, attention_probe.note_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, attention_probe.note_mask)
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION, weight_modules.run_experts)


class TransformersModel(Layer):
    """A tree of transformers with headrace's attention, weights and kernels.

    Raises:
        UnsupportedModel: the class or the config asks for what this cannot do; says what.
    """

    no_adapters = "its layers are those of transformers"
    causal = True
    """True if tokens see only those before them."""
    is_complete = False
    """It has had weights, and knows what attention its modules need."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        register()
        self.context = context
        config = read_config(context.whole_config, context.path, trusted=context.trust_remote_code)
        self.text = text_config(config)
        found = self.find_class(config)
        self.check_class(found)
        self.tree: Any = make_tree(
            found.tree,
            config,
            dtype=context.dtype,
            attention=self.attention_of(config),
            experts=ATTENTION,
        )
        weight_modules.on_device(self.tree, context.device)
        self.names = CheckpointNames(self.tree)
        self.base_name, self.base = self.find_base()
        freeze_rotary(self.base, context.max_model_len)
        tabulate_rotary(context, self.base)
        self._check_forward()
        weight_modules.silence(self.tree)
        self.run_base = WithFunctions(context.ops, self.base)
        start = f"{self.base_name}." if self.base_name else ""
        plan = TensorParallelPlan(self.base, start, context.communicator.world_size)
        tied = classes.tied_names(self.tree)
        patcher = ModulePatcher(context, self.tree, plan, tied, self.is_patched)
        self.leaves, self.later = patcher.leaves, patcher.later
        self.leaves["(all of it)"] = _AllLoaded(self)
        self.weight_rules: Sequence[WeightRule] = list(patcher.rules.values())
        self.ignored_weights: Mapping[str, str] = {
            **classes.ignored(self.tree, patcher.tied), **self.unread_weights(),
        }  # fmt: skip
        self.layers: dict[str, PagedLayer | EncoderLayer] = {}
        self.first_position = classes.first_position(self.base)
        limit = getattr(self.text, "max_position_embeddings", None)
        if self.first_position and isinstance(limit, int):
            self._check_positions(limit - self.first_position)

    def find_class(self, config: Any) -> classes.Found:
        """The class of the tree."""
        raise NotImplementedError

    def check_class(self, found: classes.Found) -> None:
        """Refuse a class that cannot run over a paged cache, before it is built."""
        classes.check(found.base, self.text.model_type)

    def attention_of(self, config: Any) -> Any:
        """Attention that the tree is built with, as transformers takes it."""
        return PROBE

    def find_base(self) -> tuple[str, Any]:
        """Name and module of what turns tokens into hidden states."""
        return classes.base_of(self.tree)

    def is_patched(self, name: str) -> bool:
        """True if a module's linear layers, norms and activations are to be headrace's."""
        return True

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors that are not read: pattern of the name in the tree -> why."""
        return {}

    def _check_forward(self) -> None:
        kinds = {p.kind for p in inspect.signature(self.base.forward).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise UnsupportedModel(
                f"Keyword arguments: {type(self.base).__name__}.forward takes no **kwargs to pass on to "
                "its attention"
            )

    def _check_positions(self, longest: int) -> None:
        if self.context.max_model_len > longest:
            raise UnsupportedModel(
                f"max_model_len = {self.context.max_model_len}: must be at most {longest}: positions "
                f"begin at {self.first_position}"
            )

    def children(self) -> Iterator[tuple[str, Layer]]:
        """The leaves, by their places in the tree."""
        yield from self.leaves.items()
        pooler = getattr(self, "pooler", None)
        if isinstance(pooler, Layer):
            yield "pooler", pooler

    def translate(self, tensors: Iterable[Stored]) -> Iterator[Stored]:
        """See :class:`headrace_core.model.TranslatesWeights`."""
        return self.names.translated(tensors)

    def complete(self) -> None:
        """Every leaf has its weights: tie what is tied, and see what attention needs."""
        self.tie()
        empty = weight_modules.meta_left(self.tree)
        if empty:
            raise UnsupportedModel(f"{type(self.tree).__name__}: no weights for {', '.join(empty)}")
        notes = attention_probe.CallRecord(self.context.max_model_len)
        context = self.context
        hidden = attention_probe.try_tree(
            self._run, self.text.vocab_size, notes, dtype=context.dtype, device=context.device
        )
        paths = {module: name for name, module in self.tree.named_modules()}
        for module, calls in notes.seen.items():
            setattr(module, LAYERS, [])
            for turn, seen in enumerate(calls):
                self._check_direction(module, seen.mask.causal)
                name = paths[module] + (f".{turn}" if turn else "")
                made = (PagedLayer if self.causal else EncoderLayer)(self.context, name, seen)
                getattr(module, LAYERS).append(made)
                self.layers[name] = made
        self.attend_by_headrace()
        self._try_head(hidden[:1])
        self.is_complete = True

    def tie(self) -> None:
        """Make of other leaves' weights what is made of them."""
        for step in self.later:
            step()

    def attend_by_headrace(self) -> None:
        """Put the attention over the cache in the place of the one that notes how it is called."""
        if self.tree.config._attn_implementation == PROBE:
            self.tree.config._attn_implementation = ATTENTION
        for module in self.tree.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == PROBE:
                config._attn_implementation = ATTENTION

    def _try_head(self, hidden: Tensor) -> None:
        """Run what comes after the base model once, on a row of its states [1, H]: what it keeps from
        then on must be computed, not recorded."""

    def _check_direction(self, module: nn.Module, causal: bool) -> None:
        if causal == self.causal:
            return
        if self.causal:
            raise UnsupportedModel(
                f"{type(module).__name__} attends in both directions, so that it generates nothing: "
                'run it for pooling, with hf_overrides {"is_causal": false} if its config does not '
                "say so"
            )
        raise UnsupportedModel(
            f"Encoder-only: {type(module).__name__} does not have is_causal = False, so it attends to "
            "earlier tokens only"
        )

    def _run(self, ids: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
        """ids and positions [T] -> final hidden states [T, H]."""
        if self.first_position:
            positions = positions + self.first_position
        with unchanged_by_recording(self.tree):
            states = self.run_base(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                **arguments,
            )
        hidden: Tensor = states.last_hidden_state
        return hidden[0]

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        """See :class:`headrace_core.model.CausalLM`."""
        return {name: x for name, x in self.layers.items() if isinstance(x, PagedLayer)}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.CausalLM`."""
        arguments: dict[str, Any] = {STEP: Step(batch)}
        if batch.token_type_ids is not None:
            arguments["token_type_ids"] = batch.token_type_ids.unsqueeze(0)
        hidden = self._run(batch.input_ids, batch.positions, **arguments)
        rows = batch.logits_rows
        return hidden.contiguous() if rows is None else self.context.ops.embedding(rows, hidden)


class TransformersForCausalLM(TransformersModel):
    """Generates text: the base model's states, and the logits that its language model makes of them."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        self.run_head = WithFunctions(context.ops, classes.without_base(*self.head_place()))

    def head_place(self) -> tuple[Any, str, Any]:
        """The model that has the head, and name and module of the model directly below it."""
        return self.tree, self.base_name, self.base

    def find_class(self, config: Any) -> classes.Found:
        context = self.context
        return classes.generating(
            context.whole_config, config, context.path, trusted=context.trust_remote_code
        )

    def _try_head(self, hidden: Tensor) -> None:
        with torch.no_grad():
            self.compute_logits(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See :class:`headrace_core.model.CausalLM`: the class's own scaling and capping included."""
        with unchanged_by_recording(self.tree):
            states = self.run_head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: Tensor = states.logits
        return logits[0]


class TransformersForPooling(TransformersModel):
    """Embeds, or classifies by the head of the checkpoint's class."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        assert context.pooling is not None
        self.causal = context.pooling.causal
        super().__init__(context, prefix)
        if not context.pooling.num_labels:
            self.pooler = TaskPooler(context.pooling, EmbeddingHead(context))
            return
        head = classes.without_base(self.tree, self.base_name, self.base)
        self.pooler = TaskPooler(context.pooling, ClassificationHead(context, _OwnLabels(head)))

    def find_class(self, config: Any) -> classes.Found:
        context = self.context
        assert context.pooling is not None
        return classes.pooling(
            context.whole_config,
            config,
            context.path,
            trusted=context.trust_remote_code,
            labels=bool(context.pooling.num_labels),
        )


class _OwnLabels(Classifier):
    """The logits that a class makes of one row of hidden states, pooled by headrace."""

    def __init__(self, head: nn.Module) -> None:
        self.tree_head = head

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [n, H] float32 -> [n, L] float32; each row as a prompt of one token."""
        dtype = next(p.dtype for p in self.tree_head.parameters() if p.is_floating_point())
        rows = [self.tree_head(inputs_embeds=row.to(dtype)).logits for row in x[:, None, None]]
        return torch.cat([row.reshape(1, -1) for row in rows]).float()


class _AllLoaded(WeightLayer):
    """Waits for every other leaf: it needs nothing, so it is loaded last."""

    name = "(all of it)"

    def __init__(self, model: TransformersModel) -> None:
        self.model = model

    def children(self) -> Iterator[tuple[str, Layer]]:
        """The model is not a piece of this."""
        yield from ()

    def slots(self) -> Mapping[str, Slot]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.is_twin:
            self.publish()

    def publish(self) -> None:
        if self.model.is_complete:
            self.model.tie()
        else:
            self.model.complete()
