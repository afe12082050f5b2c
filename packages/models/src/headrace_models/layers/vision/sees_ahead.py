"""Decoders in which tokens of a prompt see later ones of the same image, or of the whole prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_core.attention import LAST_KEYS
from headrace_models.layers.vision.media_decoder import MediaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention


class SeesAhead(MediaDecoder):
    """Which tokens do, the media processor says
    (:attr:`headrace_core.multimodal.MediaPlacement.whole_spans`); where the model pools in both directions,
    all do."""

    def attention(self, context: BuildContext, name: str, **differences: Any) -> SelfAttention:
        """See :meth:`headrace_models.layers.decoders.llama.LlamaDecoder.attention`."""
        if context.pooling is None or context.pooling.causal:
            differences["features"] = {*differences.pop("features", ()), LAST_KEYS}
        made: SelfAttention = super().attention(context, name, **differences)  # type: ignore[misc]
        return made
