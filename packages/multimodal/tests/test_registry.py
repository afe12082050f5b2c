from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from headrace_core import plugins
from headrace_core.errors import UnsupportedFeature
from headrace_multimodal import processor_for, supported_architectures


class _Processor:
    def __init__(self, config, path):
        self.made_from = config, path

    def modalities(self):
        return ["image"]

    def process(self, items, options):
        return []


@pytest.fixture
def installed(monkeypatch):
    module = types.ModuleType("some_media_plugin")
    module.Processor = _Processor
    monkeypatch.setitem(sys.modules, "some_media_plugin", module)
    entry = EntryPoint("SomeModel", "some_media_plugin:Processor", "headrace.multimodal_processors")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    plugins.forget()
    yield
    plugins.forget()


def test_a_processor_is_found_by_architecture(installed, tmp_path):
    assert supported_architectures() == ("SomeModel",)
    processor = processor_for("SomeModel", {"a": 1}, tmp_path)
    assert isinstance(processor, _Processor)
    assert processor.made_from == ({"a": 1}, tmp_path)


def test_a_model_without_one_is_refused_by_name(installed, tmp_path):
    with pytest.raises(UnsupportedFeature, match=r"'LlamaForCausalLM'.*SomeModel") as caught:
        processor_for("LlamaForCausalLM", {}, tmp_path)
    assert caught.value.param == "messages"
