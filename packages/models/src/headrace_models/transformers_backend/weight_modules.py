"""Weights of a module tree: leaves that the loader fills, and what modules compute with them.

The tree stays transformers'. A module for which headrace has something better gets another ``forward``;
its own parameters stay behind, without memory, for code that asks for their shape or dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headrace_core.errors import UnsupportedModel
from headrace_core.linear import LinearSpec
from headrace_models.layers.base import Part, Shard, Slot, WeightLayer
from headrace_models.layers.linear import Linear, shard_of
from headrace_models.transformers_backend.op_matching import BareNorm, NormLike

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear


class Parameters(WeightLayer):
    """Parameters and stored buffers of one module, as they are.

    Args:
        names: of the module's own tensors.
        exact: those that stay in float32 whatever the activations are.
    """

    def __init__(
        self, name: str, module: nn.Module, names: Sequence[str], exact: frozenset[str]
    ) -> None:
        self.name = name
        self.tensors: Mapping[str, Tensor] = {}
        self.module = module
        self.names, self.exact = tuple(names), exact

    def slots(self) -> Mapping[str, Slot]:
        return {name: self._slot(name) for name in self.names}

    def _slot(self, name: str) -> Slot:
        tensor: Tensor = getattr(self.module, name)
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            return Slot(tuple(tensor.shape), dtype, part_dim=None)
        if name in self.exact:
            return Slot(tuple(tensor.shape), "float32", part_dim=None, any_float=True)
        return Slot(tuple(tensor.shape), part_dim=None)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        if not self.is_twin:
            self.publish()

    def publish(self) -> None:
        for name, tensor in self.tensors.items():
            if name in self.module._parameters:
                self.module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                self.module._buffers[name] = tensor

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name, getattr(self.module, name)


_HARMLESS = frozenset({
    "__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "element_size",
    "get_device", "__repr__", "__format__", "detach",
})  # fmt: skip


class Elsewhere(torch.Tensor):
    """Stands for a parameter whose values a leaf took: it has a shape and a dtype, and no values.

    Code that computes with it must not get what happens to be in memory.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in _HARMLESS:
            raise UnsupportedModel(
                f"its code computes with the weight of a linear layer {list(args[0].shape)} besides "
                f"calling the layer ({func.__name__})"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def put_elsewhere(module: nn.Module) -> None:
    """Take a module's parameters away, but for their shapes and dtypes."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            empty = torch.Tensor._make_subclass(Elsewhere, parameter.data, False)
            module._parameters[name] = empty  # type: ignore[assignment]


def compute_by(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have a module of a tree compute something else than its class would."""
    vars(module)["forward"] = forward


class Projections:
    """A linear layer in place of one module, or of several that read the same input.

    Modules that are called with the very same tensor one after the other (query, key and value) get
    their parts of one product.
    """

    def __init__(self, leaf: Linear) -> None:
        self.leaf = leaf
        sizes = [part.size for part in leaf.parts]
        self.bounds = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def part(self, index: int) -> Callable[[Tensor], Tensor]:
        """The ``forward`` of one of the modules."""
        if len(self.bounds) == 1:
            return self.whole
        start, end = self.bounds[index]
        is_last = index == len(self.bounds) - 1

        def forward(x: Tensor) -> Tensor:
            out = self.output
            if out is None or x is not self.input:
                out = self.whole(x)
                self.input, self.output = x, out
            if is_last:
                self.input = self.output = None
            return out[..., start:end]

        return forward

    def whole(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., all outputs]."""
        out = self.leaf(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


def gated_forward(gate_up: Linear, down: Linear, activation: str) -> Callable[[Tensor], Tensor]:
    """The ``forward`` of a gated MLP."""

    def forward(x: Tensor) -> Tensor:
        out = down(gate_up.gated(x.reshape(-1, x.shape[-1]), activation))
        return out.view(*x.shape[:-1], out.shape[-1])

    return forward


def norm_forward(
    context: BuildContext, module: nn.Module, like: NormLike
) -> Callable[[Tensor], Tensor]:
    """The ``forward`` of an RMS norm."""
    op, eps, offset = context.ops.rms_norm, like.eps, like.offset
    own = module._parameters

    def forward(x: Tensor) -> Tensor:
        weight = own["weight"]
        assert weight is not None
        return op(x, weight, eps, offset=offset)

    return forward


def layer_norm_forward(
    context: BuildContext, module: nn.Module, eps: float
) -> Callable[[Tensor], Tensor]:
    """The ``forward`` of a layer norm over the last dimension, with a weight."""
    op, own = context.ops.layer_norm, module._parameters

    def forward(x: Tensor) -> Tensor:
        weight = own["weight"]
        assert weight is not None
        return op(x, weight, own.get("bias"), eps)

    return forward


def embedding_forward(context: BuildContext, module: nn.Embedding) -> Callable[[Tensor], Tensor]:
    """The ``forward`` of torch's table of vectors."""
    op, own = context.ops.embedding, module._parameters

    def forward(ids: Tensor) -> Tensor:
        weight = own["weight"]
        assert weight is not None
        return op(ids.reshape(-1), weight).view(*ids.shape, weight.shape[1])

    return forward


def bare_norm_forward(context: BuildContext, like: BareNorm) -> Callable[[Tensor], Tensor]:
    """The ``forward`` of a norm without a weight: the op's weights are 1."""
    ones: dict[Any, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        key = (x.shape[-1], x.dtype)
        if key not in ones:
            ones[key] = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        if like.centred:
            return context.ops.layer_norm(x, ones[key], None, like.eps)
        return context.ops.rms_norm(x, ones[key], like.eps)

    return forward


def activation_forward(context: BuildContext, kind: str) -> Callable[[Tensor], Tensor]:
    """The ``forward`` of an activation."""
    op = context.ops.activation
    return lambda x: op(x, kind)


class TiedHead:
    """A linear layer whose weight is the table of input vectors. Packed once that is loaded.

    Args:
        bias: gives the layer's bias, or None.
    """

    def __init__(self, context: BuildContext, name: str, bias: Callable[[], Tensor | None]) -> None:
        self.context, self.name, self.bias = context, name, bias
        self.apply: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def use_packed(self, packed: PackedLinear) -> None:
        """Multiply with a table that was packed for this."""
        self.apply = lambda x, bias: self.context.ops.linear(x, packed, bias)

    def use_copy(self, table: Tensor) -> None:
        """Pack, or quantize, a copy of a table that is also read as it is."""
        size, width = table.shape
        spec = LinearSpec(self.name, width, (size,), self.context.dtype)
        method = self.context.quant.for_layer(spec)
        state = method.finish(spec, {"weight": table})
        self.apply = lambda x, bias: method.apply(state, x, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., V]."""
        assert self.apply is not None, self.name
        out = self.apply(x.reshape(-1, x.shape[-1]), self.bias())
        return out.view(*x.shape[:-1], out.shape[-1])


class PackedExperts(WeightLayer):
    """A mixture's experts in two tensors, run by core's ``moe`` op.

    Args:
        shape: experts, hidden size, inner size.
    """

    def __init__(
        self, context: BuildContext, name: str, shape: tuple[int, int, int], activation: str
    ) -> None:
        experts, hidden, inner = shape
        self.name, self.ops, self.activation = name, context.ops, activation
        self.communicator = context.communicator
        self.shard: Shard = shard_of(inner, context.communicator, what=f"{name}, inner size")
        self.shape = experts, hidden, inner // self.shard.count
        self.packed: PackedLinear | None = None

    def slots(self) -> Mapping[str, Slot]:
        experts, hidden, inner = self.shape
        halves = (Part(inner, self.shard), Part(inner, self.shard))
        return {
            "gate_up_proj": Slot((experts, 2 * inner, hidden), parts=halves, part_dim=1),
            "down_proj": Slot(
                (experts, hidden, inner), part_dim=None, in_dim=2, in_shard=self.shard
            ),
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.moe.pack(tensors["gate_up_proj"], tensors["down_proj"])

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], ids and weights [T, k] -> [T, H]."""
        assert self.packed is not None, self.name
        out = self.ops.moe(
            x, self.packed, weights.float().contiguous(), ids.long().contiguous(), self.activation
        )
        return self.communicator.all_reduce(out) if self.communicator.world_size > 1 else out


EXPERTS = "headrace_experts"
"""Attribute of an experts module: its :class:`PackedExperts`, if it has one."""


def run_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """An experts function of transformers: packed ones by the op, others as the module itself does."""
    packed: PackedExperts | None = getattr(module, EXPERTS, None)
    if packed is not None:
        return packed(hidden, ids, weights)
    own: Tensor = type(module).forward.__wrapped__(module, hidden, ids, weights)
    return own


def check_plain(context: BuildContext, name: str) -> None:
    """Experts are floats as they are.

    Raises:
        UnsupportedModel: they would be quantized, which packed experts are not.
    """
    spec = LinearSpec(f"{name}.0.gate_up_proj", 64, (64,), context.dtype)
    if not context.quant.for_layer(spec).is_plain:
        raise UnsupportedModel(
            f"{name}: the transformers backend does not support quantized experts: use an architecture "
            "of headrace's own, or exclude the experts from the quantization"
        )


def exact_names(tree: Any, dtype: str) -> Callable[[str], bool]:
    """Says of a parameter's full name whether transformers keeps it in float32."""
    patterns = list(getattr(tree, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == "float16":
        patterns += list(getattr(tree, "_keep_in_fp32_modules", None) or ())
    if dtype == "float32" or not patterns:
        return lambda name: False
    either = re.compile("|".join(rf"((^|\.){p}($|\.))" for p in patterns))
    return lambda name: either.search(name) is not None


def on_device(tree: nn.Module, device: str) -> None:
    """Move what is not loaded: buffers that were computed."""
    for module in tree.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def silence(tree: nn.Module) -> None:
    """Drop a warning for which some models look at the step's first and last token."""
    for module in tree.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            vars(module)["warn_if_padding_and_no_attention_mask"] = lambda ids, mask: None


def meta_left(tree: nn.Module) -> list[str]:
    """Parameters that nothing filled and nothing stands for; for messages."""
    return [
        name
        for name, module in tree.named_modules()
        if "forward" not in vars(module)
        and any(p is not None and p.is_meta for p in module._parameters.values())
        and not hasattr(module, EXPERTS)
    ]
