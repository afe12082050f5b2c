"""Vectors of media items that were embedded, kept for whoever brings an item again.

An item that a prompt repeats, that waits after a preemption, or that another request brings is embedded once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

from headrace_core.multimodal import MediaInput

Embed = Callable[[Sequence[MediaInput]], Sequence[Tensor]]


class MediaVectors:
    """The vectors of the items that were used last, by content.

    Args:
        embed: embeds items: a tensor [num_vectors, H] each.
        max_vectors: kept at most, over all items; 0: none are.
    """

    def __init__(self, embed: Embed, max_vectors: int) -> None:
        self._embed, self._max_vectors = embed, max_vectors
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._num_vectors = 0
        self.num_embedded = 0
        """Items that :attr:`_embed` was called with."""

    def __call__(self, media: Sequence[MediaInput]) -> list[Tensor]:
        """One tensor [num_vectors, H] for each item, in order."""
        missing = {item.content_hash: item for item in media if item.content_hash not in self._kept}
        found = (
            dict(zip(missing, self._embed(list(missing.values())), strict=True)) if missing else {}
        )
        self.num_embedded += len(missing)
        vectors = [
            found.get(item.content_hash, self._kept.get(item.content_hash)) for item in media
        ]
        for item, own in zip(media, vectors, strict=True):
            assert own is not None
            self._keep(item.content_hash, own)
        return [own for own in vectors if own is not None]

    def _keep(self, name: str, vectors: Tensor) -> None:
        if name in self._kept:
            self._kept.move_to_end(name)
            return
        if not name or vectors.shape[0] > self._max_vectors:
            return
        self._kept[name] = vectors
        self._num_vectors += vectors.shape[0]
        while self._num_vectors > self._max_vectors:
            _, oldest = self._kept.popitem(last=False)
            self._num_vectors -= oldest.shape[0]

    def clear(self) -> None:
        """Forget all: the model's weights have changed, say."""
        self._kept.clear()
        self._num_vectors = 0
