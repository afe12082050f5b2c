"""Masks and modules are known by what they answer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headrace_core.errors import UnsupportedModel
from headrace_models.transformers_backend.functions import Functions, WithFunctions
from headrace_models.transformers_backend.graph_capture import unchanged_by_recording
from headrace_models.transformers_backend.masks import MaskFacts, read_mask
from headrace_models.transformers_backend.op_matching import (
    activation_like,
    bare_norm_like,
    expert_gate_like,
    gated_mlp_like,
    layer_norm_like,
    rms_norm_like,
)
from headrace_models.transformers_backend.rotary import tabulate_rotary
from headrace_models.transformers_backend.routers import router_like
from headrace_reference import activation, embedding, gate, to_float32


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (lambda b, h, q, k: k <= q, MaskFacts(True)),
        (lambda b, h, q, k: torch.ones_like(q + k, dtype=torch.bool), MaskFacts(False)),
        (lambda b, h, q, k: (k <= q) & (q - k < 5), MaskFacts(True, window=5)),
        (lambda b, h, q, k: (k <= q) & (q - k < 1), MaskFacts(True, window=1)),
        (lambda b, h, q, k: (k <= q) & (q - k < 64), MaskFacts(True)),
        (lambda b, h, q, k: (q - k).abs() < 4, MaskFacts(False, window=4)),
        (lambda b, h, q, k: (k <= q) & (k // 7 == q // 7), MaskFacts(True, chunk=7)),
    ],
)
def test_masks(function: Any, facts: MaskFacts) -> None:
    """Of 64 tokens, among which a window of 64 is none."""
    found = read_mask(function, 64)
    assert found == facts or (facts.window == 1 and found == MaskFacts(True, chunk=1))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (k <= q) & ((k % 2 == 0) | (k == q)),
        lambda b, h, q, k: (k <= q) & (k > 2),
        lambda b, h, q, k: (k <= q) | (k == 5),
        lambda b, h, q, k: (k <= q) & torch.zeros(6, dtype=torch.bool)[k],
    ],
)
def test_masks_that_nobody_here_knows(function: Any) -> None:
    with pytest.raises(UnsupportedModel, match="mask"):
        read_mask(function, 64)


class _Norm(nn.Module):
    def __init__(self, offset: float = 0.0, power: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, device="meta"))
        if bias:
            self.bias = nn.Parameter(torch.empty(12, device="meta"))
        self.eps, self.offset, self.power = 1e-5, offset, power

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().pow(self.power).mean(-1, keepdim=True)
        return x * (size + self.eps) ** (-1 / self.power) * (self.weight + self.offset)


def test_norms() -> None:
    assert rms_norm_like(_Norm()) == (1e-5, 0.0)
    assert rms_norm_like(_Norm(offset=1.0)) == (1e-5, 1.0)
    for other in (_Norm(offset=0.5), _Norm(power=1), _Norm(bias=True), nn.Embedding(3, 4)):
        assert rms_norm_like(other) is None


class _MLP(nn.Module):
    def __init__(self, act: Any, inner: Any = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        self.act, self.inner = act, inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x)) * self.up(x)
        return self.down(h if self.inner is None else self.inner(h))


def test_gated_mlps() -> None:
    names = ("gate", "up", "down")
    assert gated_mlp_like(_MLP(nn.functional.silu), *names) == "silu"
    assert gated_mlp_like(_MLP(nn.GELU(approximate="tanh")), *names) == "gelu_tanh"
    assert gated_mlp_like(_MLP(torch.tanh), *names) is None
    assert gated_mlp_like(_MLP(nn.functional.silu, nn.LayerNorm(6)), *names) is None
    assert gated_mlp_like(_MLP(nn.functional.silu), "up", "gate", "down") is None
    assert gated_mlp_like(_MLP(lambda x: nn.functional.silu(x).clamp(max=100)), *names) is None
    assert gated_mlp_like(_MLP(nn.functional.silu, lambda h: h.clamp(-9, 9)), *names) is None


class _Centred(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, device="meta"))
        self.eps, self.offset = 1e-5, offset

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def test_layer_norms_without_a_bias() -> None:
    assert layer_norm_like(_Centred()) == 1e-5
    assert layer_norm_like(_Norm()) is None
    assert rms_norm_like(_Centred()) is None


class _Bare(nn.Module):
    def __init__(self, centred: bool, size: int | None = None) -> None:
        super().__init__()
        self.centred, self.eps, self.size = centred, 1e-4, size

    def forward(self, x: Tensor) -> Tensor:
        assert self.size in (None, x.shape[-1])
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def test_norms_without_a_weight() -> None:
    assert bare_norm_like(_Bare(False), 48) == (False, 1e-4)
    assert bare_norm_like(_Bare(True, 48), 48) == (True, 1e-4)
    for other in (nn.Identity(), nn.SiLU(), nn.Softmax(-1)):
        assert bare_norm_like(other, 48) is None


def test_activations() -> None:
    found = [activation_like(x) for x in (nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.ReLU())]
    assert found == ["silu", "gelu", "gelu_tanh", "relu"]
    for other in (nn.Tanh(), nn.Identity(), nn.Dropout(0.1), nn.Linear(7, 7), nn.ReLU6()):
        assert activation_like(other) is None


def test_what_clamps_is_no_activation_and_no_gate() -> None:
    from transformers.activations import ClippedGELUActivation

    assert activation_like(ClippedGELUActivation(-10, 10)) is None
    silu = nn.functional.silu

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return silu(gate) * up

    def limited(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return silu(gate.clamp(max=7)) * up.clamp(-7, 7)

    assert expert_gate_like(SimpleNamespace(_apply_gate=plain)) == "silu"
    assert expert_gate_like(SimpleNamespace(_apply_gate=limited)) is None


class _Router(nn.Module):
    """Every way of a router, by its arguments."""

    def __init__(
        self, scoring: str, *, renormalise: bool = False, groups: int = 1, exact: bool = False,
        rounds: bool = False, inside: bool = False, bias: bool = False, other: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if inside:
            self.gate = nn.Linear(10, 8, bias=False)
        else:
            self.weight = nn.Parameter(torch.empty(8, 10, device="meta"))
        if bias:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.scoring, self.renormalise, self.exact, self.rounds = (
            scoring, renormalise, exact, rounds,
        )  # fmt: skip
        self.n_group, self.topk_group, self.scale, self.other = groups, 2, 2.5, other

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.gate.weight if hasattr(self, "gate") else self.weight
        rows = x.reshape(-1, 10)
        logits = rows.float() @ weight.float().T if self.exact else (rows @ weight.T).float()
        wide = logits.float()
        scores = wide.softmax(-1) if self.scoring == "softmax" else wide.sigmoid()
        ranked = scores + getattr(self, "e_score_correction_bias", 0.0)
        if self.n_group > 1:
            grouped = ranked.view(len(rows), self.n_group, -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0).bool()
            ranked = grouped.masked_fill(~kept.unsqueeze(-1), -1.0).flatten(1)
        ids = ranked.topk(3, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.square() if self.other else weights * self.scale
        return logits, weights.to(x.dtype) if self.rounds else weights, ids


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (_Router("softmax"), {"scoring": "softmax", "renormalise": False}),
        (_Router("softmax", renormalise=True, inside=True), {"renormalise": True}),
        (_Router("sigmoid", bias=True), {"scoring": "sigmoid", "num_groups": 1}),
        (
            _Router("sigmoid", bias=True, groups=4, renormalise=True),
            {"num_groups": 4, "top_groups": 2, "group_score": "top2", "renormalise": True},
        ),
    ],
)
def test_routers(made: _Router, options: dict[str, Any]) -> None:
    found = router_like(made)
    assert found is not None
    assert found.top_k == 3
    assert {**found.options, **options, "scale": 2.5} == found.options


def test_what_routers_compute_with() -> None:
    for exact, rounds in itertools.product((False, True), repeat=2):
        found = router_like(_Router("softmax", exact=exact, rounds=rounds))
        assert found is not None
        assert (found.exact, found.rounds) == (exact, rounds)


def test_what_is_no_router() -> None:
    for other in (_Router("softmax", other=True), nn.Linear(10, 8, bias=False), _Norm()):
        assert router_like(other) is None


class _Angles(nn.Module):
    """Of positions alone, unless it is to meet other tokens."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.counts, self.calls = counts, 0
        self.inv_freq = nn.Buffer(torch.tensor([1.0, 0.1]))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        angles = position_ids[..., None] * self.inv_freq
        angles = angles + position_ids.shape[1] if self.counts else angles
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize("counts", [False, True])
def test_rotary_tables(counts: bool) -> None:
    context: Any = SimpleNamespace(max_model_len=40, ops=SimpleNamespace(embedding=embedding))
    made = _Angles(counts=counts)
    tabulate_rotary(context, nn.ModuleList([made]))
    x = torch.zeros(1, 3, 8, dtype=torch.bfloat16)
    for positions in ([[3, 39, 0]], [[7, 7, 8]]):
        ids = torch.tensor(positions)
        for got, wanted in zip(made(x, ids), _Angles(counts=counts)(x, ids)):
            assert got.equal(wanted)
    assert made.calls == (4 if counts else 2), "a table is filled once, if it can be"


class _Turned(nn.Module):
    """What is called in the same way and computes with x."""

    def forward(self, x: Tensor, position_ids: Tensor, scale: Tensor | None = None) -> Any:
        found = x * position_ids[..., None]
        return (found if scale is None else found * scale, found)


class _Counted(nn.Module):
    def forward(self, bbox: Any = None, other: Any = None, position_ids: Any = None) -> Any:
        return position_ids + 1


def test_what_is_no_rotary_table() -> None:
    context: Any = SimpleNamespace(max_model_len=40, ops=SimpleNamespace(embedding=embedding))
    turned, counted = _Turned(), _Counted()
    tabulate_rotary(context, nn.ModuleList([turned, counted]))
    x, ids = torch.ones(1, 3, 8), torch.tensor([[3, 39, 0]])
    assert turned(x, ids)[0].equal(x * ids[..., None])
    assert turned(x, ids, torch.tensor(2.0))[0].equal(x * ids[..., None] * 2)
    assert counted(position_ids=ids).equal(ids + 1)


class _Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor = nn.Buffer(torch.zeros(2), persistent=False)
        self.longest, self.notes, self.news = 2, {"a": 1}, 0

    def forward(self, length: int) -> None:
        self.table, self.longest = torch.zeros(length), length
        self.notes["b"] = 2
        self.news = length
        self.later = length


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As a recorder does, though it computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def test_a_recorded_step_is_not_remembered() -> None:
    inner = _Remembering()
    tree, table = nn.ModuleList([inner]), inner.table
    watching = _Watching()  # type: ignore[no-untyped-call]
    with watching, unchanged_by_recording(tree):
        inner(9)
    assert inner.table is table
    assert (inner.longest, inner.news) == (2, 0)
    assert inner.notes == {"a": 1}
    assert not hasattr(inner, "later")
    with unchanged_by_recording(tree):
        inner(9)
    assert (inner.table.shape[0], inner.longest, inner.later) == (9, 9, 9)


def test_functions_that_code_calls() -> None:
    asked: list[Any] = []

    def op(x: Tensor, kind: str) -> Tensor:
        asked.append(kind)
        return x

    ops: Any = SimpleNamespace(activation=op)
    run = WithFunctions(
        ops, lambda x: nn.functional.gelu(nn.functional.silu(x), approximate="tanh")
    )
    run(torch.ones(2, 3))
    assert asked == ["silu", "gelu_tanh"]
    assert run.around is run.mode
    plain = WithFunctions(ops, lambda x: x.double().tanh() + x.relu_())
    plain(torch.ones(2, 3))
    assert asked == ["silu", "gelu_tanh"]
    assert plain.around is not plain.mode, "a tree that calls none runs without the mode"


def test_functions_compute_what_torchs_do() -> None:
    ops: Any = SimpleNamespace(activation=activation, gate=gate, to_float32=to_float32)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))
    functions = (torch.tanh, torch.sigmoid, torch.relu, nn.functional.silu, nn.functional.gelu)
    for function in functions:
        with Functions(ops) as mode:
            got = function(x)
        assert mode.is_used
        torch.testing.assert_close(got, function(x))
