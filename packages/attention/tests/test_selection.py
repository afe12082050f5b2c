"""Choosing a backend: built-in ones by entry point, foreign ones from a faked listing."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch

from headrace_attention.mla import MLAOpsBackend
from headrace_attention.paged import PagedBackend
from headrace_attention.sdpa import SDPABackend
from headrace_attention.selection import BackendChooser, choose_backend
from headrace_attention.varlen import VarlenBackend
from headrace_core import plugins
from headrace_core.attention import (
    ALIBI,
    ALIBI_SQRT,
    CHUNKS,
    KV_PREFIX,
    MLA,
    SINKS,
    SLIDING_WINDOW,
    SOFT_CAP,
    AttentionBackend,
    AttentionNeed,
    BackendFacts,
)
from headrace_core.errors import ConfigError, PluginLoadError, PluginNotFound
from headrace_core.ops import OpTable
from headrace_core.platform import CpuPlatform, Platform

NEED = AttentionNeed(head_dim=80, dtype="float16", kv_cache_dtype="auto", block_size=16)


class ForeignBackend(AttentionBackend):
    """What a stranger writes: the name and the abstract members, nothing else."""

    name: ClassVar[str] = "foreign"

    def prepare(self, batch: Any, group: int) -> Any:
        return batch.groups[group]

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any
    ) -> Any:
        return torch.zeros(query.shape)


class PickyBackend(ForeignBackend):
    name = "picky"
    supported_head_dims = (64, 128)
    supported_dtypes = ("bfloat16",)


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make exactly these backends (or broken targets) the installed ones."""

    def do(*backends: type[AttentionBackend], broken: tuple[str, ...] = ()) -> None:
        module = types.ModuleType("foreign_backends")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        listing: dict[str, plugins.Plugin] = {}
        group = "headrace.attention_backends"
        for backend in backends:
            setattr(module, backend.__name__, backend)
            target = f"{module.__name__}:{backend.__name__}"
            listing[backend.name] = plugins.Plugin(group, backend.name, target, "foreign 1.0")
        for name in broken:
            listing[name] = plugins.Plugin(group, name, "no_such_module:Backend", "broken 0.1")

        def installed(asked: str) -> Mapping[str, plugins.Plugin]:
            assert asked == group
            return dict(sorted(listing.items()))

        monkeypatch.setattr(plugins, "installed", installed)

    return do


def test_built_in_backends_are_entry_points() -> None:
    assert choose_backend(NEED, wanted="paged") is PagedBackend
    assert choose_backend(NEED, wanted="sdpa") is SDPABackend
    assert choose_backend(NEED, preferred=["paged"]) is PagedBackend


@pytest.mark.parametrize("name", ["latent", "paged", "sdpa", "varlen"])
def test_built_in_names_are_what_users_type(name: str) -> None:
    backend = plugins.load("headrace.attention_backends", name)
    assert backend.name == name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_paged_serves_every_option_everywhere(device: str, dtype: str) -> None:
    need = AttentionNeed(
        80, dtype, "auto", 16, device,
        features=frozenset({SLIDING_WINDOW, SOFT_CAP, SINKS, CHUNKS, ALIBI}),
    )  # fmt: skip
    assert PagedBackend.refuse(need) == []


@pytest.mark.parametrize(
    ("attention_type", "first"),
    [
        ("decoder", PagedBackend),
        ("encoder_decoder", PagedBackend),
        ("encoder", VarlenBackend),
        ("encoder_only", VarlenBackend),
    ],
)
@pytest.mark.parametrize(
    "platform", [CpuPlatform(), CpuPlatform(device="cuda")], ids=lambda p: p.device
)
def test_who_serves_a_type_of_attention(
    platform: Platform, attention_type: str, first: type[BackendFacts]
) -> None:
    need = dataclasses.replace(NEED, attention_type=attention_type, device=platform.device)
    assert choose_backend(need, preferred=platform.attention_order) is first
    assert SDPABackend.refuse(need) == []


@pytest.mark.parametrize(("wanted", "other"), [("paged", VarlenBackend), ("varlen", PagedBackend)])
def test_a_choice_holds_for_the_half_that_it_serves(
    wanted: str,
    other: type[BackendFacts],
    reference_ops: OpTable,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    choose = BackendChooser(reference_ops, wanted=wanted, preferred=CpuPlatform().attention_order)
    needs = [dataclasses.replace(NEED, attention_type=t) for t in ("encoder", "decoder")]
    chosen = [choose(need) for need in needs]
    assert {backend.name for backend in chosen} == {wanted, other.name}
    assert [choose(need) for need in needs] == chosen, "the same objects"
    assert caplog.text.count(f"attention backend {wanted}: not for attention of type") == 1
    choose.check_used()


def test_a_choice_that_holds_for_no_layer_is_refused(reference_ops: OpTable) -> None:
    choose = BackendChooser(reference_ops, wanted="varlen")
    choose(NEED)
    with pytest.raises(ConfigError, match=r"'varlen' cannot serve .* type decoder not supported"):
        choose.check_used()
    without = BackendChooser(reference_ops)
    without(NEED)
    without.check_used()


def test_other_reasons_against_a_choice_are_errors(reference_ops: OpTable) -> None:
    choose = BackendChooser(reference_ops, wanted="sdpa")
    with pytest.raises(ConfigError, match="logits soft cap not supported"):
        choose(dataclasses.replace(NEED, features=frozenset({SOFT_CAP})))


def test_the_error_of_a_choice_names_who_could(install: Install) -> None:
    install(PickyBackend, SDPABackend, PagedBackend, broken=("broken",))
    need = dataclasses.replace(NEED, dtype="float32")
    with pytest.raises(ConfigError, match=r"dtype not supported; could be \['paged', 'sdpa'\]"):
        choose_backend(need, wanted="picky")


def test_sdpa_is_passed_over_for_soft_caps() -> None:
    need = dataclasses.replace(NEED, features=frozenset({SOFT_CAP}))
    assert choose_backend(need, preferred=["sdpa", "paged"]) is PagedBackend
    with pytest.raises(ConfigError, match=r"'sdpa' cannot serve .* logits soft cap not supported"):
        choose_backend(need, wanted="sdpa")


def test_a_foreign_backend_is_chosen(install: Install) -> None:
    install(ForeignBackend)
    assert choose_backend(NEED) is ForeignBackend
    assert choose_backend(NEED, wanted="foreign") is ForeignBackend


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"head_dim": 1}, []),
        ({"head_dim": 577}, []),
        ({"dtype": "bfloat16", "features": frozenset({SINKS})}, ["sink setting not supported"]),
        ({"block_size": 24}, ["block_size not supported"]),
        ({"dtype": "float64"}, ["dtype not supported"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype not supported"]),
        ({"device": "cuda"}, ["device cuda not supported"]),
        ({"attention_type": "encoder_only"}, ["attention type encoder_only not supported"]),
        ({"features": frozenset({SLIDING_WINDOW})}, ["sliding window not supported"]),
        ({"features": frozenset({SOFT_CAP})}, ["logits soft cap not supported"]),
        ({"features": frozenset({CHUNKS})}, ["attention within chunks not supported"]),
        ({"features": frozenset({ALIBI})}, ["ALiBi not supported"]),
        (
            {"features": frozenset({ALIBI_SQRT})},
            ["ALiBi by the root of the distance not supported"],
        ),
        ({"features": frozenset({KV_PREFIX})}, ["learned KV prefix not supported"]),
        ({"features": frozenset({MLA})}, ["MLA not supported"]),
    ],
    ids=str,
)
def test_what_a_backend_of_defaults_refuses(change: dict[str, Any], reasons: list[str]) -> None:
    assert ForeignBackend.refuse(dataclasses.replace(NEED, **change)) == reasons


def test_a_feature_of_an_outside_family_is_a_name() -> None:
    """Core does not know it: a backend that names it serves it, the others refuse it by that name."""

    class Lean(ForeignBackend):
        supported_features = frozenset({"score lean"})

    need = dataclasses.replace(NEED, features=frozenset({"score lean"}))
    assert Lean.refuse(need) == []
    assert ForeignBackend.refuse(need) == ["score lean not supported"]


def test_a_backend_may_require_a_feature() -> None:
    assert MLAOpsBackend.refuse(NEED) == ["non-MLA not supported"]
    assert MLAOpsBackend.refuse(dataclasses.replace(NEED, features=frozenset({MLA}))) == []


def test_needs_read_alike_in_every_process() -> None:
    need = dataclasses.replace(NEED, features=frozenset({SINKS, CHUNKS, "b", "a"}))
    assert str(need).endswith("features=['a', 'b', 'chunks', 'sinks'])")


@pytest.mark.parametrize(
    "kind",
    ["fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head", "int4_per_token_head"],
)
def test_who_serves_a_cache_of_one_byte(kind: str) -> None:
    need = dataclasses.replace(NEED, kv_cache_dtype=kind)
    assert PagedBackend.refuse(need) == []
    assert SDPABackend.refuse(need) == ["kv_cache_dtype not supported"]
    on_gpu = dataclasses.replace(need, device="cuda")
    assert PagedBackend.refuse(on_gpu) == [f"kv_cache_dtype {kind} not supported on device cuda"]


def test_head_sizes_are_checked_first() -> None:
    assert PickyBackend.refuse(NEED) == ["head_size not supported", "dtype not supported"]


def test_the_preferred_order_wins(install: Install) -> None:
    install(ForeignBackend, PagedBackend, SDPABackend)
    assert choose_backend(NEED) is ForeignBackend  # by name
    assert choose_backend(NEED, preferred=["sdpa", "paged"]) is SDPABackend
    assert choose_backend(NEED, preferred=["absent", "paged"]) is PagedBackend


def test_a_refusing_backend_is_passed_over(install: Install) -> None:
    install(PickyBackend, SDPABackend)
    assert choose_backend(NEED, preferred=["picky"]) is SDPABackend


def test_a_wanted_backend_that_refuses_is_an_error(install: Install) -> None:
    install(PickyBackend, PagedBackend)
    with pytest.raises(ConfigError, match="head_size not supported; dtype not supported") as error:
        choose_backend(NEED, wanted="picky")
    assert error.value.field == "attention.backend"


def test_the_error_lists_every_candidate_with_its_reasons(install: Install) -> None:
    install(ForeignBackend, PickyBackend)
    with pytest.raises(ConfigError) as error:
        choose_backend(dataclasses.replace(NEED, features=frozenset({SOFT_CAP})))
    message = str(error.value)
    assert "foreign: logits soft cap not supported" in message
    assert (
        "picky: head_size not supported, dtype not supported, logits soft cap not supported"
    ) in message


def test_nothing_installed_says_what_to_install(install: Install) -> None:
    install()
    with pytest.raises(ConfigError, match="pip install headrace-attention"):
        choose_backend(NEED)


def test_an_unknown_name_lists_the_known_ones(install: Install) -> None:
    install(PagedBackend)
    with pytest.raises(PluginNotFound, match="Did you mean 'paged'"):
        choose_backend(NEED, wanted="pagde")


def test_a_broken_backend_is_an_error_when_asked_for(install: Install) -> None:
    install(ForeignBackend, broken=("broken",))
    with pytest.raises(PluginLoadError, match="no_such_module"):
        choose_backend(NEED, wanted="broken")
    assert choose_backend(NEED, wanted="foreign") is ForeignBackend


@pytest.mark.parametrize("cls", [PagedBackend, MLAOpsBackend])
def test_half_bytes_want_an_even_head(cls: type[AttentionBackend]) -> None:
    need = dataclasses.replace(
        NEED, kv_cache_dtype="int4_per_token_head", features=cls.required_features
    )
    assert cls.refuse(need) == []
    assert cls.refuse(dataclasses.replace(need, head_dim=33)) == [
        "kv_cache_dtype int4_per_token_head needs an even head_dim, not 33"
    ]
    whole = dataclasses.replace(need, head_dim=33, kv_cache_dtype="int8_per_token_head")
    assert cls.refuse(whole) == []
