from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from headrace_core import plugins
from headrace_core.errors import PluginConflict, PluginLoadError, PluginNotFound


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


def test_unknown_name_gives_nearest_and_all_names(group):
    group(_entry("triton", "t:x"), _entry("reference", "r:x"))
    with pytest.raises(PluginNotFound, match=r"'tritn'.*Did you mean 'triton'.*reference, triton"):
        plugins.load("headrace.kernels", "tritn")


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
