"""Models that take images, run by transformers' code: vectors by its towers, the rest as for text.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ModelError, UnsupportedModel
from headrace_core.model import INPUT_EMBEDS, MROPE_POSITIONS, InputEmbeds, ModelInfo
from headrace_core.multimodal import MediaInput
from headrace_models.transformers_backend import classes, towers
from headrace_models.transformers_backend.attention import STEP, Step
from headrace_models.transformers_backend.graph_capture import unchanged_by_recording
from headrace_models.transformers_backend.library import transformers
from headrace_models.transformers_backend.model import ATTENTION, PROBE, TransformersForCausalLM
from headrace_models.transformers_backend.refusals import IMAGES_REFUSED, PROJECTORS, RENAMED_INPUTS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch

_PLACES = "get_rope_index"
"""Method of models whose tokens of images stand in time, height and width."""

_OURS = frozenset({ATTENTION, PROBE})


def class_for(info: ModelInfo) -> type[TransformersForCausalLM]:
    """The class that takes a checkpoint's images, or its text alone if they are limited to 0."""
    named = getattr(transformers(), info.architecture)
    own = vars(sys.modules[named.__module__]).values()
    in_three_axes = any(isinstance(found, type) and hasattr(found, _PLACES) for found in own)
    if not info.processor:
        return TransformersWithoutTowers
    return TransformersForImagesInAxes if in_three_axes else TransformersForImages


class TransformersWithoutTowers(TransformersForCausalLM):
    """The text of a checkpoint with towers, which are not loaded."""

    parts: towers.Parts | None = None
    dropped: Sequence[str] = ()

    def check_class(self, found: classes.Found) -> None:
        """The language model's class is checked once it is known."""

    def find_base(self) -> tuple[str, Any]:
        try:
            self.parts = towers.parts_of(self.tree)
        except UnsupportedModel:
            # Joined in another way: all of it is loaded, and text runs through.
            name, base = super().find_base()
            classes.check(type(base), self.text.model_type)
            return name, base
        classes.check(type(self.parts.language), self.text.model_type)
        self.dropped = self.parts.towers()
        for name in self.dropped:
            owner, _, key = name.rpartition(".")
            setattr(self.tree.get_submodule(owner), key, None)
        return self.parts.language_name, self.parts.language

    def attention_of(self, config: Any) -> Any:
        return towers.attention_of_parts(config, self.text, PROBE)

    def head_place(self) -> tuple[Any, str, Any]:
        if self.parts is None:
            return super().head_place()
        return towers.head_place(self.tree, self.parts)

    def unread_weights(self) -> Mapping[str, str]:
        why = "of a tower, which is not loaded"
        return {rf"{re.escape(name)}(\..*)?": why for name in self.dropped}


class TransformersForImages(TransformersForCausalLM):
    """A language model over the paged cache, with towers that make vectors of images."""

    modalities: ClassVar[Sequence[str]] = ("image",)

    def check_class(self, found: classes.Found) -> None:
        """The language model's class is checked once it is known."""
        whole = self.context.whole_config
        if whole.get("model_type") in IMAGES_REFUSED:
            raise _refused(f"{found.tree.__name__}: {IMAGES_REFUSED[whole['model_type']]}")
        if whole.get("is_encoder_decoder"):
            raise _refused(f"{found.tree.__name__} is an encoder-decoder model")

    def find_base(self) -> tuple[str, Any]:
        """
        Raises:
            UnsupportedModel: images go elsewhere than into the stream of vectors; says where.
        """
        try:
            self._find_parts()
        except UnsupportedModel as error:
            raise _refused(str(error)) from error
        return self.parts.language_name, self.parts.language

    def _find_parts(self) -> None:
        self.parts = towers.parts_of(self.tree)
        classes.check(type(self.parts.language), self.text.model_type)
        self.features = towers.features_of(self.parts, self.tree)
        projector = PROJECTORS.get(self.context.whole_config.get("model_type", ""))
        self.projector = None if projector is None else self.parts.outer.get_submodule(projector)
        self.takes = frozenset(inspect.signature(self.features).parameters)
        towers.keep_attention(self.tree, self.parts, _OURS)
        towers.check_wrapper(self.parts, self.context.dtype, self.context.device)

    def attention_of(self, config: Any) -> Any:
        return towers.attention_of_parts(config, self.text, PROBE)

    def head_place(self) -> tuple[Any, str, Any]:
        return towers.head_place(self.tree, self.parts)

    def is_patched(self, name: str) -> bool:
        return self.parts.is_text(name)

    def attend_by_headrace(self) -> None:
        super().attend_by_headrace()
        towers.keep_attention(self.tree, self.parts, _OURS)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: of each item, what transformers' processor makes of it alone; what
                ``get_image_features`` does not take is passed over.

        Raises:
            ModelError: transformers does not take it; says what it says.
        """
        return [self._embedded(item) for item in inputs]

    def _embedded(self, item: Mapping[str, Tensor]) -> Tensor:
        dtype = getattr(torch, self.context.dtype)
        named = {RENAMED_INPUTS.get(name, name): value for name, value in item.items()}
        given = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in named.items()
            if name in self.takes
        }
        try:
            made = towers.states_of(self.features(**given))
            if self.projector is not None:
                made = self.projector(made)
        except Exception as error:  # the towers are anybody's code
            shapes = {name: list(value.shape) for name, value in given.items()}
            raise ModelError(
                f"{type(self.tree).__name__}.get_image_features({shapes}): {error}"
            ) from error
        return towers.vectors_of(made, self.parts.language.config.hidden_size).to(dtype)

    def input_vectors(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPromptEmbeds`."""
        given: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if given is None:
            return self._table(batch.input_ids)
        ids = batch.input_ids.index_fill(0, given.rows, 0)  # placeholders need not be in the table
        return self._table(ids).index_copy(0, given.rows, given.values)

    def _table(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.parts.language.get_input_embeddings()(ids.unsqueeze(0))
        return vectors[0]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.CausalLM`."""
        hidden = self._run_vectors(
            self.input_vectors(batch), self.places(batch), **{STEP: Step(batch)}
        )
        rows = batch.logits_rows
        return hidden.contiguous() if rows is None else self.context.ops.embedding(rows, hidden)

    def places(self, batch: ForwardBatch) -> Tensor:
        """Positions as transformers takes them: [1, T]."""
        return batch.positions.unsqueeze(0)

    def _run(self, ids: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
        return self._run_vectors(self._table(ids), positions.unsqueeze(0), **arguments)

    def _run_vectors(self, vectors: Tensor, positions: Tensor, **arguments: Any) -> Tensor:
        """Vectors [T, H] and positions [..., T] -> final hidden states [T, H]."""
        with unchanged_by_recording(self.tree):
            states = self.run_base(
                inputs_embeds=vectors.unsqueeze(0),
                position_ids=positions,
                use_cache=False,
                **arguments,
            )
        hidden: Tensor = states.last_hidden_state
        return hidden[0]


class TransformersForImagesInAxes(TransformersForImages):
    """The same, for models whose tokens of images stand in time, height and width."""

    def _find_parts(self) -> None:
        super()._find_parts()
        places = inspect.signature(getattr(self.parts.outer, _PLACES)).parameters
        needed = {"mm_token_type_ids", "image_grid_thw"}
        if needed - set(places) or "image_grid_thw" not in self.takes:
            raise UnsupportedModel(
                f"{type(self.parts.outer).__name__}.{_PLACES} does not tell places from kinds of tokens and "
                "sizes of images"
            )
        axes = self._index(torch.zeros(1, 1, dtype=torch.int64), None).shape[0]
        if axes != 3:
            raise UnsupportedModel(f"{type(self.parts.outer).__name__} has places on {axes} axes")

    def places(self, batch: ForwardBatch) -> Tensor:
        """[3, 1, T] in steps with tokens of an image's prompt."""
        axes: Tensor | None = batch.extra.get(MROPE_POSITIONS)
        return super().places(batch) if axes is None else axes.unsqueeze(1)

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`: transformers' ``get_rope_index``, which asks of
        tokens only whether they are of an image. It takes neighbouring images for one, so it is asked for
        each with the text in front of it.

        Raises:
            ModelError: it does not take an item's size.
        """
        found, place, done = [], 0, 0
        for item in media:
            end = item.offset + item.num_tokens
            # One token more than the item's: it tells where text goes on.
            kinds = torch.zeros(1, end - done + 1, dtype=torch.int64)
            for first, number in item.vector_runs:
                start = item.offset - done + first
                kinds[0, start : start + number] = 1
            places = self._index(kinds, _grids(item))[:, 0] + place
            found.append(places[:, :-1])
            place, done = int(places[0, -1]), end
        rest = num_tokens - done
        found.append(torch.arange(place, place + rest).expand(3, rest))
        return torch.cat(found, dim=1)

    def _index(self, kinds: Tensor, grids: Tensor | None) -> Tensor:
        """Places [axes, 1, T] of tokens of the kinds [1, T]: 1 are of an image."""
        outer = self.parts.outer
        try:
            found: Tensor = getattr(outer, _PLACES)(
                input_ids=torch.zeros_like(kinds), mm_token_type_ids=kinds, image_grid_thw=grids
            )[0]
        except Exception as error:  # the tree is anybody's code
            raise ModelError(f"{type(outer).__name__}.{_PLACES}: {error}") from error
        return found


def _refused(why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"images: {why}. Its text alone is tried with --limit-mm-per-prompt '{{\"image\": 0}}'"
    )


def _grids(item: MediaInput) -> Tensor:
    """[n, 3] of an item."""
    return torch.tensor(item.inputs["image_grid_thw"].tolist(), dtype=torch.int64).reshape(-1, 3)
