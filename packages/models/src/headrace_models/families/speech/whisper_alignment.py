"""Attention heads that follow the audio: where each token of a transcript was spoken.

As Whisper's authors do it (github.com/openai/whisper, ``timing.py``). Letters: N heads, T tokens,
E encoder states.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from headrace_core.errors import UnsupportedFeature, UnsupportedModel
from headrace_models.config.settings import Settings
from headrace_models.generating import alignment_heads

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.layers.attention.cross_attention import CrossAttention

AttentionWeights = dict[tuple[int, int], "Tensor"]
"""By layer and head: [T, E] float32."""


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
        heads = alignment_heads(generation, settings)
        if not heads:
            raise UnsupportedFeature(
                "times of words: the checkpoint's generation_config.json has no 'alignment_heads'"
            )
        width = settings.integer("median_filter_width", 7)
        if width % 2 == 0:
            raise UnsupportedModel(f"config.json: median_filter_width = {width}: must be odd")
        return cls(heads, width)

    @contextmanager
    def watching(self, layers: Sequence[CrossAttention]) -> Iterator[AttentionWeights]:
        """While it lasts, a forward leaves the heads' weights here."""
        weights: AttentionWeights = {}
        watched = {layer for layer, _ in self.heads}
        try:
            for index in watched:
                layers[index].watch = functools.partial(self._see, weights, index, layers[index])
            yield weights
        finally:
            for index in watched:
                layers[index].watch = None

    def _see(
        self,
        weights: AttentionWeights,
        index: int,
        layer: CrossAttention,
        query: Tensor,
        key: Tensor,
    ) -> None:
        for head in (head for at, head in self.heads if at == index):
            scores = query[:, head].float() @ key[:, head].float().T
            weights[index, head] = torch.softmax(scores * layer.spec.scale, dim=-1)

    def matrix(self, weights: AttentionWeights, begin: int, num_states: int) -> Tensor:
        """[T - begin, num_states] float32: tokens from ``begin`` on against the states of audio.

        Each state's weights are standardised over the tokens, smoothed over time, and averaged over
        the heads.
        """
        chosen = torch.stack([weights[pair][begin:, :num_states] for pair in self.heads])
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
