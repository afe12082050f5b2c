"""Classes of IO processors are found by the name of their plug-in."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.assembly.io_processors import load_io_processor
from headrace_core import plugins
from headrace_core.errors import PluginLoadError, PluginNotFound
from headrace_core.pooling.io_processor import IOProcessor, IOProcessorResponse

NOT_A_PROCESSOR = object()


class Lengths(IOProcessor):
    """Lists of texts -> the lengths of their results."""

    def parse_request(self, request: Any) -> Any:
        return request

    def pre_process(self, prompt: Any, request_id: str | None = None, **_: Any) -> Any:
        return prompt

    def post_process(self, model_output: Any, request_id: str | None = None, **_: Any) -> Any:
        return [output.outputs.data for output in model_output]

    def output_to_response(self, output: Any) -> IOProcessorResponse:
        return IOProcessorResponse(output)


def named() -> str:
    return f"{__name__}.Lengths"


def wrong_name() -> str:
    return f"{__name__}.Nothing"


def test_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        name: plugins.Plugin("headrace.io_processors", name, f"{__name__}:{target}", "tests 1")
        for name, target in (("class", "Lengths"), ("function", "named"), ("missing", "wrong_name"),
                             ("other", "NOT_A_PROCESSOR"))
    }  # fmt: skip
    monkeypatch.setattr(plugins, "installed", lambda group: found)
    assert load_io_processor("class").__name__ == "Lengths"
    assert load_io_processor("function").__name__ == "Lengths"
    with pytest.raises(PluginLoadError, match=r"Nothing.*cannot be imported"):
        load_io_processor("missing")
    with pytest.raises(PluginLoadError, match="must be a subclass"):
        load_io_processor("other")
    with pytest.raises(PluginNotFound, match="Installed: class, function"):
        load_io_processor("nobody")
