"""Attention heads that follow the audio: where each token of a transcript was spoken.

As Whisper's authors do it (github.com/openai/whisper, ``timing.py``). Letters: N heads, T tokens,
E encoder states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from headrace_core.errors import UnsupportedFeature, UnsupportedModel
from headrace_models.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.layers.cross_attention import CrossAttention


class AlignmentHeads:
    """The heads that a checkpoint names.

    Args:
        heads: (layer, head) each.
        width: of the median filter over encoder states, odd.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], width: int) -> None:
        self.heads = heads
        self.width = width

    @classmethod
    def of(cls, generation: Mapping[str, Any], settings: Settings) -> AlignmentHeads:
        """``alignment_heads`` of the generation config, ``median_filter_width`` of the config.

        Raises:
            UnsupportedFeature: no heads are named.
            UnsupportedModel: they are not within the decoder, or the width is even.
        """
        stated = generation.get("alignment_heads")
        if not stated:
            raise UnsupportedFeature(
                "times of words: the checkpoint's generation_config.json has no 'alignment_heads'"
            )
        layers = settings.integer("decoder_layers")
        heads = settings.integer("decoder_attention_heads")
        good = isinstance(stated, list) and all(
            isinstance(pair, list)
            and [type(number) for number in pair] == [int, int]
            and 0 <= pair[0] < layers
            and 0 <= pair[1] < heads
            for pair in stated
        )
        if not good:
            raise UnsupportedModel(
                f"generation_config.json: alignment_heads = {stated!r:.200}: must be pairs of a layer "
                f"below {layers} and a head below {heads}"
            )
        width = settings.integer("median_filter_width", 7)
        if width % 2 == 0:
            raise UnsupportedModel(f"config.json: median_filter_width = {width}: must be odd")
        return cls([(layer, head) for layer, head in stated], width)

    @contextmanager
    def watching(self, layers: Sequence[CrossAttention]) -> Iterator[dict[int, Tensor]]:
        """While it lasts, a forward leaves its weights here: by layer, [heads, T, E] float32."""
        weights: dict[int, Tensor] = {}
        wanted = {layer for layer, _ in self.heads}

        def watch(index: int, query: Tensor, key: Tensor) -> None:
            scores = torch.einsum("thd,ehd->hte", query.float(), key.float())
            weights[index] = torch.softmax(scores * layers[index].spec.scale, dim=-1)

        try:
            for index in wanted:
                layers[index].watch = lambda q, k, index=index: watch(index, q, k)
            yield weights
        finally:
            for index in wanted:
                layers[index].watch = None

    def matrix(self, weights: Mapping[int, Tensor], begin: int, num_states: int) -> Tensor:
        """[T - begin, num_states] float32: tokens from ``begin`` on against the states of audio.

        Each state's weights are standardised over the tokens, smoothed over time, and averaged over
        the heads.
        """
        chosen = torch.stack([weights[layer][head] for layer, head in self.heads])
        chosen = chosen[:, begin:, :num_states]
        deviation, mean = torch.std_mean(chosen, dim=1, keepdim=True, correction=0)
        standard = torch.where(deviation > 0, (chosen - mean) / deviation, 0.0)
        return median_filtered(standard, self.width).mean(0)


def median_filtered(x: Tensor, width: int) -> Tensor:
    """The median of ``width`` neighbours along the last axis, mirrored at the ends; x [N, T, E].

    An axis that is too short to be mirrored stays as it is.
    """
    margin = width // 2
    if x.shape[-1] <= margin:
        return x
    return pad(x, (margin, margin), mode="reflect").unfold(-1, width, 1).median(-1).values
