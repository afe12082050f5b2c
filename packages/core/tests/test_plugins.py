from __future__ import annotations

import json
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from headrace_core import plugins
from headrace_core.errors import PluginConflict, PluginError, PluginLoadError, PluginNotFound
from headrace_core.plugins import ModelRegistry


def _entry(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, target, "headrace.kernels")


@pytest.fixture
def group(monkeypatch):
    """Replace the installed entry points of every group."""

    def install(*entries: EntryPoint) -> None:
        monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
        plugins.forget()

    yield install
    plugins.forget()


@pytest.mark.req("REL-24")
def test_listing_imports_nothing_and_sorts(group):
    group(_entry("b", "no_such_module:x"), _entry("a", "neither_this:y"))
    assert list(plugins.installed("headrace.kernels")) == ["a", "b"]
    assert "no_such_module" not in sys.modules


def test_duplicate_names_are_an_error_naming_both(group):
    group(_entry("fast", "one:x"), _entry("fast", "two:x"))
    with pytest.raises(PluginConflict, match=r"'fast'.*one:x.*two:x"):
        plugins.installed("headrace.kernels")


def test_the_same_entry_found_twice_on_the_path_is_no_conflict(group):
    group(_entry("fast", "one:x"), _entry("fast", "one:x"))
    assert list(plugins.installed("headrace.kernels")) == ["fast"]


def test_a_distribution_is_read_once_for_all_its_plug_ins(group):
    class Distribution:
        asked = 0
        version = "1.0"

        @property
        def name(self) -> str:
            Distribution.asked += 1
            return "many"

    entries, one = [_entry(f"name{i}", "m:x") for i in range(5)], Distribution()
    for entry in entries:
        vars(entry)["dist"] = one
    group(*entries)
    found = plugins.installed("headrace.kernels")
    assert {plugin.distribution for plugin in found.values()} == {"many 1.0"}
    assert Distribution.asked == 1


def test_what_is_installed_is_looked_through_once(monkeypatch):
    calls = []
    scan = plugins.all_entry_points
    monkeypatch.setattr(plugins, "all_entry_points", lambda: calls.append(1) or scan())
    plugins.forget()
    assert plugins.installed("headrace.kernels") is not None
    assert plugins.installed("headrace.executors") is not None
    assert len(calls) == 1
    plugins.forget()


def test_unknown_name_gives_nearest_and_all_names(group):
    group(_entry("triton", "t:x"), _entry("reference", "r:x"))
    with pytest.raises(PluginNotFound, match=r"'tritn'.*Did you mean 'triton'.*reference, triton"):
        plugins.load("headrace.kernels", "tritn")
    with pytest.raises(PluginNotFound, match=r"'TRITON'.*Did you mean 'triton'"):
        plugins.load("headrace.kernels", "TRITON")


@pytest.mark.req("REL-24")
def test_a_plugin_that_fails_to_import_is_an_error_with_its_cause(group, tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no device')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    group(_entry("broken", "broken_plugin:X"))
    with pytest.raises(PluginLoadError, match=r"'broken'.*RuntimeError: no device") as caught:
        plugins.load("headrace.kernels", "broken")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_load_returns_the_object(group, monkeypatch):
    module = types.ModuleType("good_plugin")
    module.THING = object()
    monkeypatch.setitem(sys.modules, "good_plugin", module)
    group(_entry("good", "good_plugin:THING"))
    assert plugins.load("headrace.kernels", "good") is module.THING


def test_an_unlisted_group_is_a_programming_error():
    with pytest.raises(KeyError, match=r"headrace\.kernels"):
        plugins.installed("headrace.kernel")


class Registered:
    """A class that code registers."""

    def __init__(self, context: object, prefix: str = "") -> None: ...


def test_code_registers_for_this_process(group, caplog):
    group(_entry("a", "one:x"))
    plugins.register("headrace.kernels", "a", "json:loads")
    assert plugins.load("headrace.kernels", "a") is json.loads
    assert "'a' of module json (json:loads) replaces that of" in caplog.text
    plugins.register("headrace.kernels", "a", "json:loads")  # the same again
    with pytest.raises(PluginConflict, match=r"module json \(json:loads\) and by module os"):
        plugins.register("headrace.kernels", "a", "os:getcwd")
    plugins.forget()
    assert plugins.installed("headrace.kernels")["a"].target == "one:x"


def test_general_plugins_run_once(group, monkeypatch):
    module = types.ModuleType("general_example")
    module.calls = []
    module.first = lambda: module.calls.append(1)
    module.second = lambda: module.calls.append(2)
    monkeypatch.setitem(sys.modules, "general_example", module)
    entries = [_entry("first", "general_example:first"), _entry("second", "general_example:second")]
    group(*entries)
    assert [plugin.name for plugin in plugins.run_general()] == ["first", "second"]
    plugins.run_general()
    assert module.calls == [1, 2]
    plugins.forget()
    monkeypatch.setenv("HEADRACE_PLUGINS", "second,")
    plugins.run_general()
    assert module.calls == [1, 2, 2]
    plugins.forget()
    monkeypatch.setenv("HEADRACE_PLUGINS", "third")
    with pytest.raises(PluginNotFound, match=r"'third' is installed; installed: first, second"):
        plugins.run_general()


def test_models_are_classes_with_our_constructor(group):
    group()
    ModelRegistry.register_model("AForCausalLM", Registered)
    assert plugins.load("headrace.models", "AForCausalLM") is Registered
    for wrong in ("no_colon", len, lambda context, prefix="": None):
        with pytest.raises(PluginError, match="model class"):
            ModelRegistry.register_model("BForCausalLM", wrong)
    with pytest.raises(PluginError, match=r"its constructor must take \(context, prefix=\"\"\)"):
        ModelRegistry.register_model("BForCausalLM", dict)
