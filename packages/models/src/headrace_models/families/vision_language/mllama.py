"""Llama 3.2 Vision without an image: Llama, whose layers that attend to images are passed over.

Meta 2024, Llama 3 technical report, arXiv:2407.21783, section 7.3. Without an image transformers skips a
layer of cross-attention whole, its MLP included.

Block: Llama's, or ``x``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BY_DEFAULT = (3, 8, 13, 18, 23, 28, 33, 38)


class SkippedBlock(Block):
    """A layer that text passes by."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        return x, residual


class MllamaForCausalLM(LlamaDecoder):
    """The text of Llama 3.2 11B and 90B Vision; ``cross_attention_layers`` are the layers for images."""

    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.for_images = self.image_layers()
        super().prepare(context, prefix)

    def is_tied(self) -> bool:
        """Never, whatever the config says: the table has rows that the head lacks."""
        return False

    def image_layers(self) -> frozenset[int]:
        """Raises: UnsupportedModel: the config names a layer that does not exist, or leaves none."""
        count = self.num_layers()
        if self.settings.config.get("cross_attention_layers") is None:
            found = frozenset(index for index in _BY_DEFAULT if index < count)
        else:
            found = frozenset(self.settings.integers("cross_attention_layers"))
        if not found <= set(range(count)) or len(found) == count:
            raise UnsupportedModel(
                f"config.json: cross_attention_layers = {sorted(found)!r:.200}: must be some of the layers "
                f"0 to {count - 1}, not all"
            )
        return found

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        if index in self.for_images:
            return SkippedBlock()
        return super().make_block(context, index, name)

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The tensors that text needs. The table of input vectors ends with eight rows that the head does
        not have, for the token that stands for an image."""
        rows = self.settings.integer("vocab_size")
        for name, tensor, file in tensors:
            layer = _LAYER.match(name)
            if layer is not None and int(layer[1]) in self.for_images:
                continue
            yield name, tensor[:rows] if name == "model.embed_tokens.weight" else tensor, file
