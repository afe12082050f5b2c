"""Ops that no provider has."""

from __future__ import annotations

import importlib
from typing import Protocol

import pytest

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.ops import (
    OP_NAMES,
    OPTIONAL_OP_NAMES,
    KernelNeed,
    OptionalOp,
    bind_ops,
    known_op_names,
)
from headrace_core.ops.optional.xielu import XIELU


class _Plugin:
    target = "elsewhere:PROVIDER"
    distribution = "elsewhere"

    def load(self):
        return _FewOps()


class _FewOps:
    name = "few"

    def refuse(self, need):
        return []

    def priority(self, need):
        return 100

    def operations(self, need):
        return {"scale": lambda x, factor: x * factor}

    def row_invariant(self, need):
        return True


@pytest.fixture(autouse=True)
def only_few(monkeypatch):
    monkeypatch.setattr(plugins, "installed", lambda group: {"few": _Plugin()})


def test_a_provider_of_one_op_serves_alone():
    table = bind_ops(KernelNeed("cpu", "float32"))
    assert table.scale(3.0, 2.0) == 6.0
    assert table.providers == {"scale": "few"}
    assert not table.vnni_packed


@pytest.mark.parametrize("use", [lambda op: op(1.0), lambda op: op.pack(1.0)])
def test_an_op_that_nobody_has_is_named_where_it_is_used(use):
    table = bind_ops(KernelNeed("cpu", "float32"))
    with pytest.raises(ConfigError, match=r"op 'linear': no installed .* pip install headrace-ref"):
        use(table.linear)


def test_an_op_that_is_insisted_on_is_refused_at_once():
    with pytest.raises(ConfigError, match="op 'linear': provider 'few' lacks it"):
        bind_ops(KernelNeed("cpu", "float32"), choose={"linear": "few"})
    assert "linear" in OP_NAMES


class GlowOp(Protocol):
    def __call__(self, x: float) -> float: ...


GLOW: OptionalOp[GlowOp] = OptionalOp("glow")


@pytest.fixture
def brings_glow(monkeypatch):
    """The provider has an op that core does not know, and says so."""
    monkeypatch.setattr(_FewOps, "own_ops", ("glow",), raising=False)
    monkeypatch.setattr(
        _FewOps, "operations", lambda self, need: {"glow": lambda x: x + 1, "clamp": min}
    )


def test_an_op_of_an_outside_package_is_found_by_its_name(brings_glow):
    table = bind_ops(KernelNeed("cpu", "float32"), choose={"glow": "few"})
    assert table.optional(GLOW)(1.0) == 2.0
    assert table.providers == {"clamp": "few", "glow": "few"}
    assert {"glow", "clamp", "linear"} < set(known_op_names())


def test_an_optional_op_that_nobody_has_is_named_as_a_layer_is_built():
    table = bind_ops(KernelNeed("cpu", "float32"))
    with pytest.raises(
        ConfigError, match=r"op 'xielu': no installed .* pip install headrace-refer"
    ):
        table.optional(XIELU)


def test_an_optional_op_that_is_insisted_on_is_refused_at_once(brings_glow):
    with pytest.raises(ConfigError, match="op 'xielu': provider 'few' lacks it; could be"):
        bind_ops(KernelNeed("cpu", "float32"), choose={"xielu": "few"})


def test_names_that_nobody_declares_are_told(caplog, monkeypatch):
    monkeypatch.setattr(_FewOps, "operations", lambda self, need: {"rms_nrom": None})
    table = bind_ops(KernelNeed("cpu", "float32"))
    assert "ops ['rms_nrom'] are not used: core does not know them" in caplog.text
    assert not table.others
    with pytest.raises(
        ConfigError, match=r"no op is named \['glow', 'rms_nrom'\]; ops are \['embed"
    ):
        bind_ops(KernelNeed("cpu", "float32"), choose={"rms_nrom": "few", "glow": "few"})


def test_the_modules_of_optional_ops_are_called_as_their_ops():
    for name in OPTIONAL_OP_NAMES:
        module = importlib.import_module(f"headrace_core.ops.optional.{name}")
        assert getattr(module, name.upper()) == OptionalOp(name)
