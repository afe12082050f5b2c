"""Gives every module of a tree its weight layers, and replaces what modules compute with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from headrace_core.errors import UnsupportedModel
from headrace_core.linear import LinearSpec
from headrace_core.model import WeightRule
from headrace_models.layers.base import WHOLE as ALL
from headrace_models.layers.base import Part, WeightLayer
from headrace_models.layers.embedding import PackedEmbedding
from headrace_models.layers.linear import Linear, quantizes_floats, shard_of
from headrace_models.transformers_backend.op_matching import (
    activation_like,
    bare_norm_like,
    expert_gate_like,
    gated_mlp_like,
    layer_norm_like,
    rms_norm_like,
)
from headrace_models.transformers_backend.plan import COLUMNS, HALVES, ROWS, TensorParallelPlan
from headrace_models.transformers_backend.refusals import KEPT
from headrace_models.transformers_backend.routers import Router, router_like
from headrace_models.transformers_backend.weight_modules import (
    EXPERTS,
    PackedExperts,
    Parameters,
    Projections,
    TiedHead,
    activation_forward,
    bare_norm_forward,
    check_plain,
    compute_by,
    embedding_forward,
    exact_names,
    gated_forward,
    layer_norm_forward,
    norm_forward,
    put_elsewhere,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
)
"""Names of neighbours that read the same input; if they do not, they are computed one by one."""
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class ModulePatcher:
    """The leaves of a tree, their rules, and what is to be done once they are loaded.

    Args:
        tied: full name of a parameter -> that of the one whose values it has.
        is_patched: says of a module's full name whether headrace computes it; others are loaded, and
            stay as they are.
    """

    def __init__(
        self,
        context: BuildContext,
        tree: Any,
        plan: TensorParallelPlan,
        tied: dict[str, str],
        is_patched: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.context, self.tree, self.plan, self.tied = context, tree, plan, tied
        self.leaves: dict[str, WeightLayer] = {}
        self.rules: dict[tuple[str, str, int], WeightRule] = {}
        self.later: list[Callable[[], None]] = []
        """Run in order once every leaf has its weights."""
        self.done: set[nn.Module] = set()
        self.hidden_size = int(getattr(tree.config.get_text_config(), "hidden_size", 0) or 0)
        self.is_exact = exact_names(tree, context.dtype)
        self.kept = KEPT.get(tree.config.model_type, ())
        """Ends of names of linear layers that stay torch's."""
        modules = dict(tree.named_modules())
        for name, module in modules.items():
            if is_patched(name):
                self._patch_parent(name, module)
        for name, module in modules.items():
            if not is_patched(name):
                self._keep(name, module)
            elif module not in self.done:
                self._patch(name, module)

    # ---- modules with modules

    def _patch_parent(self, name: str, module: nn.Module) -> None:
        for gate, up, down in _GATED:
            if self._are_linear(name, module, (gate, up, down)):
                kind = gated_mlp_like(module, gate, up, down)
                if kind is not None:
                    self._patch_gated(name, module, (gate, up, down), kind)
        for names in _TOGETHER:
            if self._are_linear(name, module, names) and self._cut_alike(name, names):
                self._patch_together(name, module, names)
        self._patch_router(name, module)

    def _are_linear(self, name: str, module: nn.Module, names: Sequence[str]) -> bool:
        """True if all of the children are plain linear layers with weights of their own, and the first ones
        of the same input size."""
        children = [module._modules.get(child) for child in names]
        return all(
            type(child) is nn.Linear
            and child not in self.done
            and f"{name}.{which}.weight" not in self.tied
            and not self._stays(f"{name}.{which}")
            for which, child in zip(names, children)
        )

    def _stays(self, name: str) -> bool:
        return self.is_exact(f"{name}.weight") or name.endswith(tuple(self.kept))

    def _cut_alike(self, name: str, names: Sequence[str]) -> bool:
        module = self.tree.get_submodule(name)
        sizes = {module.get_submodule(child).in_features for child in names}
        styles = {self.plan.style(f"{name}.{child}") for child in names}
        return len(sizes) == 1 and len(styles) == 1 and not styles & {ROWS, HALVES}

    def _patch_gated(
        self, name: str, module: nn.Module, names: tuple[str, str, str], kind: str
    ) -> None:
        if not self._cut_alike(name, names[:2]):
            return
        gate_up = self._patch_together(name, module, names[:2])
        down = self._linear(f"{name}.{names[2]}", module.get_submodule(names[2]))
        compute_by(module, gated_forward(gate_up, down, kind))

    def _patch_together(self, name: str, module: nn.Module, names: Sequence[str]) -> Linear:
        children = [module.get_submodule(child) for child in names]
        assert all(isinstance(child, nn.Linear) for child in children)
        paths = [f"{name}.{child}" for child in names]
        parts = [
            part for path, child in zip(paths, children) for part in self._out_parts(path, child)
        ]
        biased = [child.bias is not None for child in children]
        leaf = Linear(
            self.context,
            f"{name}.{'+'.join(names)}",
            int(children[0].in_features),  # type: ignore[arg-type]
            parts,
            bias=any(biased),
            unbiased=tuple(i for i, has in enumerate(biased) if not has) if any(biased) else (),
            part_names=tuple(paths),
        )
        self._add(leaf.name, leaf)
        projections = Projections(leaf)
        for index, (path, child) in enumerate(zip(paths, children)):
            self._rule(path, leaf.name, part=index)
            if biased[index] and not all(biased):  # biases are numbered without those that are not
                part = sum(biased[:index])
                self._rule(f"{path}.bias", f"{leaf.name}.bias", part=part)
            compute_by(child, projections.part(index))
            put_elsewhere(child)
            self.done.add(child)
        return leaf

    def _patch_router(self, name: str, module: nn.Module) -> None:
        """Its tensors are loaded as they are, and packed once they are there."""
        like = router_like(module)
        if like is None:
            return
        router = Router(self.context, module, like)
        compute_by(module, router)
        self.later.append(router.pack)
        owner, _, key = like.weight.rpartition(".")
        if owner:  # a linear layer of the router's own
            name, part = f"{name}.{owner}", module.get_submodule(owner)
            exact = frozenset([key] if self.is_exact(f"{name}.{key}") else [])
            self._add(name, Parameters(name, part, [key], exact))
            self._rule(name, name)
            self.done.add(part)

    # ---- modules with parameters

    def _patch(self, name: str, module: nn.Module) -> None:
        self._patch_weightless(module)
        own, stored = _tensors_of(module)
        if not own | stored:
            return
        if self._patch_experts(name, module) or self._patch_tied(name, module, own):
            return
        is_linear = type(module) is nn.Linear or _is_conv1d(module)
        if is_linear and not self._stays(name):
            self._linear(name, module)
            return
        if type(module) is nn.Embedding and module.max_norm is None:
            compute_by(module, embedding_forward(self.context, module))
        self._patch_norm(module)
        self._load_as_it_is(name, module)

    def _keep(self, name: str, module: nn.Module) -> None:
        """A module that computes what its class does."""
        if any(_tensors_of(module)):
            self._load_as_it_is(name, module)

    def _load_as_it_is(self, name: str, module: nn.Module) -> None:
        own, stored = _tensors_of(module)
        names = [key for key in (*sorted(own), *sorted(stored)) if f"{name}.{key}" not in self.tied]
        exact = frozenset(key for key in names if self.is_exact(f"{name}.{key}"))
        for key in own - set(names):
            self._tie(f"{name}.{key}", module, key)
        if names:
            self._add(name, Parameters(name, module, names, exact))
            self._rule(name, name)

    def _patch_weightless(self, module: nn.Module) -> None:
        """Activations, and norms that do not weigh."""
        kind = activation_like(module)
        if kind is not None:
            compute_by(module, activation_forward(self.context, kind))
            return
        norm = bare_norm_like(module, self.hidden_size)
        if norm is not None:
            compute_by(module, bare_norm_forward(self.context, norm))

    def _patch_norm(self, module: nn.Module) -> None:
        if type(module) is nn.LayerNorm:
            if len(module.normalized_shape) == 1 and module.weight is not None:
                compute_by(module, layer_norm_forward(self.context, module, module.eps))
            return
        like, eps = rms_norm_like(module), layer_norm_like(module)
        if like is not None:
            compute_by(module, norm_forward(self.context, module, like))
        elif eps is not None:
            compute_by(module, layer_norm_forward(self.context, module, eps))

    def _patch_experts(self, name: str, module: Any) -> bool:
        if not hasattr(module, "_apply_gate") or not hasattr(module, "has_gate"):
            return False
        check_plain(self.context, name)
        plain = module.has_gate and module.is_concatenated
        plain = plain and not (
            module.is_transposed or module.has_bias or module.has_post_expert_norm
        )
        # Other children are experts of another kind (LongCat's, that do nothing).
        plain = plain and {child for child, _ in module.named_children()} <= {"act_fn"}
        kind = expert_gate_like(module) if plain else None
        names = sorted(module._parameters)
        if kind is None or names != ["down_proj", "gate_up_proj"] or list(module.buffers(False)):
            return False
        experts, hidden, inner = module.down_proj.shape
        leaf = PackedExperts(self.context, name, (experts, hidden, inner), kind)
        self._add(name, leaf)
        self._rule(f"{name}.gate_up_proj", f"{name}.gate_up_proj", split=())
        self._rule(f"{name}.down_proj", f"{name}.down_proj")
        setattr(module, EXPERTS, leaf)
        return True

    def _linear(self, name: str, module: Any) -> Linear:
        style = self.plan.style(name)
        conv1d = _is_conv1d(module)
        inputs = int(module.weight.shape[0] if conv1d else module.in_features)
        shard = ALL
        if style == ROWS:
            shard = shard_of(inputs, self.context.communicator, what=f"{name}, inputs")
        leaf = Linear(
            self.context,
            name,
            inputs // shard.count,
            self._out_parts(name, module),
            bias=module.bias is not None and f"{name}.bias" not in self.tied,
            in_shard=shard,
            reduce=style == ROWS,
        )
        self._add(name, leaf)
        self._rule(name, name, split=() if style == HALVES else None, transposed=conv1d)
        compute_by(module, Projections(leaf).whole)
        put_elsewhere(module)
        self.done.add(module)
        if f"{name}.bias" in self.tied:
            raise UnsupportedModel(f"{name}.bias is another layer's, its weight is not")
        return leaf

    def _out_parts(self, name: str, module: Any) -> list[Part]:
        """Parts of a layer's outputs that this rank keeps; heads stay whole."""
        size = int(module.weight.shape[1] if _is_conv1d(module) else module.out_features)
        style = self.plan.style(name)
        if style not in (COLUMNS, HALVES):
            return [Part(size)]
        if style == HALVES:
            half = shard_of(size // 2, self.context.communicator, what=f"{name}, half")
            return [Part(size // 2 // half.count, half)] * 2
        head = getattr(self.tree.get_submodule(name.rpartition(".")[0]), "head_dim", None)
        units = size // head if isinstance(head, int) and size % head == 0 else size
        shard = shard_of(units, self.context.communicator, what=f"{name}, outputs")
        return [Part(size // shard.count, shard)]

    # ---- parameters that are others'

    def _patch_tied(self, name: str, module: Any, own: set[str]) -> bool:
        """A head that is the table of input vectors."""
        source = self.tied.get(f"{name}.weight")
        if source is None or type(module) is not nn.Linear:
            return False
        table_name = source.removesuffix(".weight")
        table = self.tree.get_submodule(table_name)
        bias_source = self.tied.get(f"{name}.bias")
        if bias_source is not None:
            owner, _, key = bias_source.rpartition(".")
            holder = self.tree.get_submodule(owner) if owner else self.tree
            head = TiedHead(self.context, name, lambda: holder._parameters[key])
        else:
            head = TiedHead(self.context, name, lambda: module._parameters.get("bias"))
        if module.bias is not None and bias_source is None:
            self._add(name, Parameters(name, module, ["bias"], frozenset()))
            self._rule(f"{name}.bias", f"{name}.bias")
        compute_by(module, head)
        if not self._share_packed(table_name, table, head):
            self.later.append(lambda: head.use_copy(table.weight.data))
        return True

    def _share_packed(self, name: str, table: nn.Module, head: TiedHead) -> bool:
        """Hold the table once, packed for the head, if nothing else reads it."""
        if type(table) is not nn.Embedding or table in self.done:
            return False
        rows, size = table.weight.shape
        spec = LinearSpec(head.name, size, (rows,), self.context.dtype)
        if quantizes_floats(self.context.quant.for_layer(spec), spec):
            return False
        leaf = PackedEmbedding(self.context, name, rows, size)
        self.leaves[name] = leaf  # instead of its parameters, if those were there
        self._rule(name, name)
        self.done.add(table)

        def forward(ids: Tensor) -> Tensor:
            return leaf(ids.reshape(-1)).view(*ids.shape, size)

        compute_by(table, forward)
        self.later.append(lambda: head.use_packed(leaf.weight()))
        return True

    def _tie(self, name: str, module: nn.Module, key: str) -> None:
        owner, _, source = self.tied[name].rpartition(".")
        holder = self.tree.get_submodule(owner) if owner else self.tree

        def tie() -> None:
            module._parameters[key] = holder._parameters[source]

        self.later.append(tie)

    # ---- bookkeeping

    def _add(self, path: str, leaf: WeightLayer) -> None:
        self.leaves[path] = leaf

    def _rule(
        self,
        source: str,
        target: str,
        *,
        part: int = 0,
        split: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> None:
        """One rule for all layers: numbers are wildcards."""
        source, target = (re.sub(r"(?<![^.])\d+(?![^.])", "{}", name) for name in (source, target))
        rule = WeightRule(source, target, part=part, split=split, transposed=transposed)
        self.rules[source, target, part] = rule


def _tensors_of(module: nn.Module) -> tuple[set[str], set[str]]:
    """Names of a module's own parameters, and of its buffers that checkpoints store."""
    own = {key for key, p in module._parameters.items() if p is not None}
    passing = module._non_persistent_buffers_set
    stored = {key for key, b in module._buffers.items() if b is not None and key not in passing}
    return own, stored


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, which stores [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D
