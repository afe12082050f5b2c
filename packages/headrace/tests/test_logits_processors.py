"""Classes of logits processors are found, by plug-in or by name, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.assembly.logits_processors import load_processors, processor_name
from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginLoadError
from headrace_core.sampling import logits_processor
from headrace_core.sampling.logits_processor import BatchUpdate, LogitsProcessor


class Nothing(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits


class Other(Nothing):
    class Inner(Nothing):
        pass


NOT_A_PROCESSOR = object


def test_classes_and_names_are_loaded_once_in_order() -> None:
    here = __name__
    found = load_processors([Other, f"{here}:Nothing", f"{here}:Other", f"{here}:Other.Inner"])
    assert found == (Other, Nothing, Other.Inner)
    assert load_processors(()) == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:Thing", "could not be imported"),
        (f"{__name__}:Missing", "has no 'Missing'"),
        (f"{__name__}:NOT_A_PROCESSOR", "not a subclass"),
        (f"{__name__}.Nothing", "not a class name"),
        (":Nothing", "not a class name"),
        (object, "not a subclass"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_processors([name])
    assert str(name) in str(caught.value)
    assert caught.value.field == "model.logits_processors"


def test_installed_plugins_are_always_loaded_and_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(target: str) -> Any:
        plugin = plugins.Plugin(logits_processor.GROUP, "mine", target, "a-package 1.0")
        return lambda group: {"mine": plugin} if group == logits_processor.GROUP else {}

    monkeypatch.setattr(plugins, "installed", installed(f"{__name__}:Nothing"))
    assert load_processors([Other]) == (Nothing, Other)
    monkeypatch.setattr(plugins, "installed", installed(f"{__name__}:NOT_A_PROCESSOR"))
    with pytest.raises(ConfigError, match="NOT_A_PROCESSOR"):
        load_processors([])
    monkeypatch.setattr(plugins, "installed", installed("no.such.module:Thing"))
    with pytest.raises(PluginLoadError, match=r"no\.such\.module"):
        load_processors([])


def test_names_for_another_process() -> None:
    class Local(Nothing):
        pass

    assert processor_name(Other.Inner) == f"{__name__}:Other.Inner"
    assert processor_name("a.b:C") == "a.b:C"
    with pytest.raises(ConfigError, match="cannot be imported by another process"):
        processor_name(Local)
