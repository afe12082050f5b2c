"""A model of text with towers for media: mixins of the families that join the two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core import plugins
from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer
from headrace_models.layers.decoder import Decoder
from headrace_models.quantization import GROUP, PLAIN

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.linear import QuantMethod
    from headrace_core.model import BuildContext


class MediaModel(Layer, ABC):
    """Comes before the class of the model of text in the MRO (:mod:`headrace_models.text_part`)."""

    modalities: ClassVar[Sequence[str]] = ("image",)
    media_rules: ClassVar[Sequence[WeightRule]]
    """Rules of the towers' tensors."""
    decoder_rules: ClassVar[Sequence[WeightRule]] = ()
    """Rules of what the decoder has beside the model of text's, for media alone."""
    media_names: ClassVar[Sequence[tuple[str, str]]] = ()
    """Beginning of a tower's name in published files -> what :attr:`media_rules` have in its place."""

    has_towers: ClassVar[bool] = True
    """False: media come as vectors (:class:`headrace_core.multimodal.TakesEmbeds`)."""
    media_parts: Sequence[str] = ()
    """Attributes that :meth:`make_towers` has made: towers and projectors, which run on media alone."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)  # type: ignore[call-arg] # that class's
        self.place_media(context.whole_config)
        if type(self).has_towers:
            before = set(vars(self))
            self.make_towers(replace(context, quant=_plain(context)), context.whole_config)
            self.media_parts = tuple(name for name in vars(self) if name not in before)

    def place_media(self, whole: Mapping[str, Any]) -> None:
        """Read what the decoder must know of media whose vectors are there.

        Args:
            whole: ``config.json``.
        """

    @abstractmethod
    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        """Make what turns media into vectors.

        Args:
            context: its ``quant`` leaves weights as they are.
            whole: ``config.json``.
        """

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`: the language model's, and the towers'."""
        own = self.unread_weights() if type(self).has_towers else {}
        return {**getattr(super(), "ignored_weights", {}), **own}

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of towers that are not read: pattern of the whole name -> why."""
        return {}

    @abstractmethod
    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`."""


TABLE_IN_VECTORS = "rows of it are in vectors of images, which are kept for all requests"
"""``no_adapters`` of the table of input vectors, in families where that is so."""


class MediaDecoder(MediaModel, Decoder):
    """The model of text is a decoder."""


def _plain(context: BuildContext) -> QuantMethod:
    """The method of weights in floats; the context's own where no methods are installed."""
    if PLAIN not in plugins.installed(GROUP):
        return context.quant
    method: type[QuantMethod] = plugins.load(GROUP, PLAIN)
    return method.from_config(None, context.ops)


def part_of(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of a config.

    Raises: UnsupportedModel: it is none.
    """
    found = whole.get(key)
    if not isinstance(found, Mapping):
        raise UnsupportedModel(f"config.json: {key} = {found!r:.200}: must be an object")
    return found
