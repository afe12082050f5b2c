"""Blocks that several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NoNorm, NormLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.ops import OpTable


class PreNormBlock(Block):
    """``h = x + attention(norm(x)); h + mlp(norm(h))``: Llama, GPT-2 and most since."""

    def __init__(
        self,
        input_norm: NormLayer | NoNorm,
        attention: SelfAttention,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention(x, batch)
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x), stream


class ScaledBlock(PreNormBlock):
    """``h = x + s * attention(norm(x)); h + s * mlp(norm(h))``: Granite, MiniCPM.

    Args:
        scale: s.
    """

    def __init__(
        self,
        ops: OpTable,
        scale: float,
        input_norm: NormLayer,
        attention: SelfAttention,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
    ) -> None:
        super().__init__(input_norm, attention, mlp_norm, mlp)
        self.ops, self.scale = ops, scale

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.ops.scale(self.attention(x, batch), self.scale)
        x, stream = self.mlp_norm.add(x, stream)
        return self.ops.scale(self.mlp(x), self.scale), stream


class ParallelBlock(Block):
    """``x + attention(norm(x)) + mlp(norm(x))``: both halves read one stream.

    Args:
        mlp_norm: of the MLP, if it has one of its own (GPT-NeoX, Falcon 40B); None: both halves read
            what ``input_norm`` gives (GPT-J, Cohere).
    """

    def __init__(
        self,
        ops: OpTable,
        input_norm: NormLayer,
        attention: SelfAttention,
        mlp: MLPLayer,
        mlp_norm: NormLayer | None = None,
    ) -> None:
        self.ops = ops
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        y = x if self.mlp_norm is None else self.mlp_norm(stream)
        return self.ops.add(self.attention(x, batch), self.mlp(y)), stream


class PostNormBlock(Block):
    """``h = x + norm(attention(x)); h + norm(mlp(h))``: OLMo 2, EXAONE 4."""

    def __init__(
        self,
        ops: OpTable,
        attention: SelfAttention,
        attention_out_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.ops = ops
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else self.ops.add(x, residual)
        x = self.attention_out_norm(self.attention(stream, batch))
        stream = self.ops.add(x, stream)
        return self.mlp_out_norm(self.mlp(stream)), stream


class NormedSumBlock(Block):
    """``h = norm(x + attention(x)); norm(h + mlp(h))``: GPT, OPT 350M."""

    def __init__(
        self,
        attention: SelfAttention,
        attention_norm: NormLayer,
        mlp: MLPLayer,
        mlp_norm: NormLayer,
    ) -> None:
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, None]:
        assert residual is None  # the block before ended in a norm of the sum
        x, _ = self.attention_norm.add(self.attention(x, batch), x)
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x, None


class SandwichBlock(Block):
    """``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``: Gemma 2 and 3, GLM-4-0414."""

    def __init__(
        self,
        input_norm: NormLayer,
        attention: SelfAttention,
        attention_out_norm: NormLayer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention_out_norm(self.attention(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp_out_norm(self.mlp(x)), stream


class ScaledSandwichBlock(SandwichBlock):
    """``h = x + s * norm(attention(norm(x))); h + s * norm(mlp(norm(h)))``: HyperCLOVA X.

    Args:
        scale: s.
        arguments: of :class:`SandwichBlock`.
    """

    def __init__(self, ops: OpTable, scale: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ops, self.scale = ops, scale

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.ops.scale(self.attention_out_norm(self.attention(x, batch)), self.scale)
        x, stream = self.mlp_norm.add(x, stream)
        return self.ops.scale(self.mlp_out_norm(self.mlp(x)), self.scale), stream


class Mixer(Protocol):
    """A layer that mixes a request's tokens: attention or a recurrence."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        ...


class MixerBlock(Block):
    """``x + mixer(norm(x))``: Mamba, and what has its MLPs in blocks of their own."""

    def __init__(self, norm: NormLayer, mixer: Mixer) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.norm.add(x, residual)
        return self.mixer(x, batch), stream


class FeedForwardBlock(Block):
    """``x + mlp(norm(x))``: stands between blocks of mixers."""

    def __init__(self, norm: NormLayer, mlp: MLPLayer) -> None:
        self.norm = norm
        self.mixer = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.norm.add(x, residual)
        return self.mixer(x), stream


class HybridBlock(Block):
    """``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being attention or a recurrence."""

    def __init__(
        self, input_norm: NormLayer, mixer: Mixer, mlp_norm: NormLayer, mlp: MLPLayer
    ) -> None:
        self.input_norm = input_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.mixer(x, batch)
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x), stream


class ScaledHybridBlock(HybridBlock):
    """``h = x + s * mixer(norm(x)); h + s * mlp(norm(h))``: Granite 4.

    Args:
        scale: s.
    """

    def __init__(
        self,
        ops: OpTable,
        scale: float,
        input_norm: NormLayer,
        mixer: Mixer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
    ) -> None:
        super().__init__(input_norm, mixer, mlp_norm, mlp)
        self.ops, self.scale = ops, scale

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.ops.scale(self.mixer(x, batch), self.scale)
        x, stream = self.mlp_norm.add(x, stream)
        return self.ops.scale(self.mlp(x), self.scale), stream
