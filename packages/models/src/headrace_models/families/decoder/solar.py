"""Solar Pro: Llama whose stream, at some layers, is mixed with what it was some layers before.

Upstage 2024, solar-pro-preview. Its config names a window, which its code does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

PAIRS = (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4"))
"""Keys of the layers before which the stream is kept, and of those before which it is mixed in."""


class SolarForCausalLM(LlamaDecoder):
    """Solar Pro 22B."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        shares = self.settings.numbers("bskcn_tv", 2)
        if shares is None:
            raise UnsupportedModel("config.json has no 'bskcn_tv', which the model needs")
        self.share = shares[1]  # the first is that of training
        self.pairs = [
            (self.settings.integers(kept), self.settings.integers(mixed)) for kept, mixed in PAIRS
        ]
        for (kept, mixed), names in zip(self.pairs, PAIRS):
            if mixed and min(kept, default=self.num_layers()) > min(mixed):
                raise UnsupportedModel(
                    f"config.json: {names[1]} = {mixed!r}: must begin behind {names[0]} = {kept!r}"
                )

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        ops = self.context.ops
        residual: Tensor | None = None
        before: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            for pair, (kept, mixed) in enumerate(self.pairs):
                if index not in kept and index not in mixed:
                    continue
                x, residual = x if residual is None else ops.add(x, residual), None
                if index in kept:
                    before[pair] = ops.scale(x, 1.0)  # a copy: the layer gives up what it gets
                if index in mixed:
                    own = ops.scale(x, 1.0 - self.share)
                    x = ops.add(ops.scale(before[pair], self.share), own)
            x, residual = layer(x, residual, batch)
        return x, residual
