"""Vectors of media items that were embedded, kept for whoever brings an item again.

An item that a prompt repeats, that waits after a preemption, or that another request brings is embedded once;
and once for each adapter that changes the towers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

from headrace_core.multimodal import MediaInput
from headrace_engine.encoder.transfer import EncoderTransfer
from headrace_engine.encoder.vectors_ahead import VectorsAhead

Embed = Callable[[Sequence[MediaInput]], Sequence[Tensor]]
Given = Callable[[MediaInput], Tensor | None]
"""An item -> vectors that it brings; None: it brings none."""


class MediaVectors:
    """The vectors of the items that were used last, by content.

    Args:
        embed: embeds items: a tensor [num_vectors, H] each.
        max_vectors: kept at most, over all items; 0: none are.
        given: vectors that came with an item, which are not kept.
        transfer: other engines that make vectors, or take them; None: there are none.
        make_ahead: embeds items beside steps, given what embeds one; None: nobody does.
    """

    def __init__(
        self,
        embed: Embed,
        max_vectors: int,
        given: Given = lambda item: None,
        transfer: EncoderTransfer | None = None,
        make_ahead: Callable[[Callable[[MediaInput], Tensor]], VectorsAhead] | None = None,
    ) -> None:
        self._embed, self._max_vectors, self._given = embed, max_vectors, given
        self._transfer = transfer
        self._ahead = None if make_ahead is None else make_ahead(self._one)
        self._kept: OrderedDict[tuple[str, str], Tensor] = OrderedDict()
        """By content hash, and digest of the adapter of the towers."""
        self._num_vectors = 0
        self.num_embedded = 0
        """Items that :attr:`_embed` was called with."""

    def __call__(self, media: Sequence[MediaInput], adapter: str = "") -> list[Tensor]:
        """One tensor [num_vectors, H] for each item, in order.

        Args:
            adapter: digest of the adapter that towers run with now; "": none. With one, items are embedded
                here and now: what is done ahead, and elsewhere, is done without.
        """
        given = [self._given(item) for item in media]
        towers = [item for item, own in zip(media, given, strict=True) if own is None]
        made = self._made_with(towers, adapter) if adapter else self._made(towers)
        vectors = [
            made[item.content_hash] if own is None else own
            for item, own in zip(media, given, strict=True)
        ]
        for item in towers:
            self._keep(item.content_hash, adapter, made[item.content_hash])
            if self._transfer is not None and not adapter:
                self._transfer.save(item, made[item.content_hash])
        return vectors

    def work_ahead(self, media: Sequence[MediaInput], step_seconds: float) -> list[str]:
        """Take items to embed beside steps, and work at what there is for a share of a step's time.

        Returns:
            Content hashes of items that nobody needs to wait for any more.
        """
        if self._ahead is None:
            return [item.content_hash for item in media]
        kept = [item.content_hash for item in media if (item.content_hash, "") in self._kept]
        done = self._ahead.add(item for item in media if (item.content_hash, "") not in self._kept)
        return [*kept, *done, *self._ahead.advance(step_seconds)]

    def _one(self, item: MediaInput) -> Tensor:
        """Vectors of an item that was never here."""
        loaded = None if self._transfer is None else self._transfer.load(item)
        if loaded is not None:
            return loaded
        self.num_embedded += 1
        return self._embed([item])[0]

    def _made_with(self, media: Sequence[MediaInput], adapter: str) -> dict[str, Tensor]:
        """Vectors by hash: those that are kept of the adapter, and those that are made now."""
        items = {item.content_hash: item for item in media}
        kept = {name: self._kept.get((name, adapter)) for name in items}
        missing = [name for name, own in kept.items() if own is None]
        made = self._embed([items[name] for name in missing]) if missing else ()
        self.num_embedded += len(missing)
        found = {name: own for name, own in kept.items() if own is not None}
        return found | dict(zip(missing, made, strict=True))

    def _made(self, media: Sequence[MediaInput]) -> dict[str, Tensor]:
        """Vectors by hash: those that are kept, those of other engines, and those that are made now."""
        items = {item.content_hash: item for item in media}
        found = {name: self._kept[name, ""] for name in items if (name, "") in self._kept}
        if self._ahead is not None:
            early = {name: self._ahead.take(name) for name in items if name not in found}
            found |= {name: own for name, own in early.items() if own is not None}
        missing = {name: item for name, item in items.items() if name not in found}
        if missing and self._transfer is not None:
            loaded = {name: self._transfer.load(item) for name, item in missing.items()}
            found |= {name: own for name, own in loaded.items() if own is not None}
            missing = {name: item for name, item in missing.items() if name not in found}
        if missing:
            found.update(zip(missing, self._embed(list(missing.values())), strict=True))
        self.num_embedded += len(missing)
        return found

    def _keep(self, name: str, adapter: str, vectors: Tensor) -> None:
        key = name, adapter
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        if not name or vectors.shape[0] > self._max_vectors:
            return
        self._kept[key] = vectors
        self._num_vectors += vectors.shape[0]
        while self._num_vectors > self._max_vectors:
            _, oldest = self._kept.popitem(last=False)
            self._num_vectors -= oldest.shape[0]

    def clear(self) -> None:
        """Forget all: the model's weights have changed, say."""
        if self._ahead is not None:
            self._ahead.clear()
        self._kept.clear()
        self._num_vectors = 0
