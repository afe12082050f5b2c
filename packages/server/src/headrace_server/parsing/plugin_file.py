"""Parsers from a user's own Python file, in the shape that vLLM's parser plug-ins have.

A file given by ``--tool-parser-plugin`` or ``--reasoning-parser-plugin`` registers classes::

    from headrace.tool_parsers import ToolParser, ToolParserManager

    @ToolParserManager.register_module("mine")
    class MyParser(ToolParser): ...

The classes and their results are given here; :mod:`headrace_server.parsing.vllm_adapters` makes them
parsers of ours. Two things differ from vLLM: parsers get text and no token ids, and both the lists
of ids and the tokenizer refuse to be asked. (What a parser reads is what stop texts, reasoning and
incomplete characters have left of the text; no list of ids is exactly that.) A plug-in that wants to be more
than that implements :class:`headrace_core.text.ToolCallParser` and is installed as a package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, Field

from headrace_core.errors import ConfigError, PluginLoadError, UnsupportedFeature

# What parsers return


class FunctionCall(BaseModel):
    """A function's name and arguments (JSON text)."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A whole call."""

    id: str = Field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")
    type: str = "function"
    function: FunctionCall


class ExtractedToolCallInformation(BaseModel):
    """Parts of a whole answer."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(BaseModel):
    """A piece of a call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    """Part of a call."""

    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunctionCall | None = None


class DeltaMessage(BaseModel):
    """New parts of a streamed answer."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


# What parsers are given


class PluginFunction(BaseModel):
    """A tool's function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class PluginTool(BaseModel):
    """A tool of the request."""

    type: str = "function"
    function: PluginFunction


@dataclass
class PluginRequest:
    """Fields of the request that a parser may see; ``adjust_request`` may change the last field."""

    tools: list[PluginTool] = field(default_factory=list)
    tool_choice: str = "auto"
    skip_special_tokens: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class NoTokenizer:
    """Stands where vLLM gives a tokenizer: text stays text in this server."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedFeature(
            f"tokenizer.{name}: parser plug-ins get text, not tokens, from this server; compare "
            "texts of marks instead of their ids"
        )

    def __bool__(self) -> bool:
        return True


class NoTokenIds(Sequence[int]):
    """Stands where vLLM gives a list of token ids. May be passed on, but not looked into."""

    def _refuse(self) -> NoReturn:
        raise UnsupportedFeature(
            "token ids: parser plug-ins get text, not tokens, from this server; compare texts of "
            "marks (delta_text, current_text) instead of their ids"
        )

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __contains__(self, item: object) -> bool:
        self._refuse()

    def __iter__(self) -> Iterator[int]:
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()

    def __eq__(self, other: object) -> bool:
        self._refuse()

    __hash__ = None  # type: ignore[assignment]


# What users derive from


class ToolParser:
    """Base of tool-call parsers in a user's file. One object per answer.

    Args:
        tokenizer: refuses to be asked; see the module.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.model_tokenizer = tokenizer
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    @property
    def vocab(self) -> Any:
        """Refused: see the module."""
        return self.model_tokenizer.get_vocab()

    def adjust_request(self, request: PluginRequest) -> PluginRequest:
        """May set ``skip_special_tokens`` to False, if the format's tags are special tokens."""
        return request

    def extract_tool_calls(
        self, model_output: str, request: PluginRequest
    ) -> ExtractedToolCallInformation:
        """The calls of a whole answer."""
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls")

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: PluginRequest,
    ) -> DeltaMessage | None:
        """Parts that a piece of a streamed answer adds; None: nothing yet. The lists of ids refuse."""
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls_streaming")


class ReasoningParser:
    """Base of reasoning parsers in a user's file. One object per answer.

    A class whose ``end_token`` is the text that ends the reasoning can be used along with
    structured output.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.model_tokenizer = tokenizer

    @property
    def vocab(self) -> Any:
        """Refused: see the module."""
        return self.model_tokenizer.get_vocab()

    def extract_reasoning(
        self, model_output: str, request: PluginRequest
    ) -> tuple[str | None, str | None]:
        """(reasoning, content) of a whole answer."""
        raise NotImplementedError(f"{type(self).__name__}.extract_reasoning")

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Parts that a piece of a streamed answer adds; None: nothing yet. The lists of ids refuse."""
        raise NotImplementedError(f"{type(self).__name__}.extract_reasoning_streaming")


# Registration

Class = TypeVar("Class", bound=type)


@dataclass
class RegisteredParsers:
    """The classes that a file registered, by name; a lazy one is ``(module, class)``."""

    tools: dict[str, type | tuple[str, str]] = field(default_factory=dict)
    reasoning: dict[str, type | tuple[str, str]] = field(default_factory=dict)


_ACTIVE: ContextVar[RegisteredParsers] = ContextVar("headrace_parser_plugins")
"""Where the file that is being imported registers."""


class _Manager:
    _part: ClassVar[str]

    @classmethod
    def register_module(
        cls,
        name: str | Sequence[str] | None = None,
        force: bool = True,
        module: type | None = None,
    ) -> Callable[[Class], Class]:
        """Decorator of a class, or with ``module`` a plain call.

        Args:
            name: one or several; by default the class's own.
            force: False: refuse a name that the file has already given.
        """
        names = [name] if isinstance(name, str) else name

        def register(registered: Class) -> Class:
            for one in names if names is not None else [registered.__name__]:
                cls._add(one, registered, force=force)
            return registered

        if module is not None:
            register(module)
        return register

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """A class that is imported when its name is asked for."""
        cls._add(name, (module_path, class_name), force=True)

    @classmethod
    def _add(cls, name: str, what: type | tuple[str, str], *, force: bool) -> None:
        active = _ACTIVE.get(None)
        if active is None:
            raise ConfigError(
                f"{cls.__name__}: {name!r} can be registered only by a file that "
                "--tool-parser-plugin or --reasoning-parser-plugin names"
            )
        names: dict[str, type | tuple[str, str]] = getattr(active, cls._part)
        if name in names and not force:
            raise ConfigError(f"{cls.__name__}: {name!r} is registered already")
        names[name] = what


class ToolParserManager(_Manager):
    """Where a user's file registers tool-call parsers."""

    _part = "tools"


class ReasoningParserManager(_Manager):
    """Where a user's file registers reasoning parsers."""

    _part = "reasoning"


@contextmanager
def _registering(into: RegisteredParsers) -> Iterator[None]:
    token = _ACTIVE.set(into)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def import_file(path: str) -> RegisteredParsers:
    """Run a user's file and return what it registered.

    Raises:
        PluginLoadError: naming the file, with the original exception as its cause.
    """
    registered = RegisteredParsers()
    name = f"headrace_parser_plugin_{Path(path).stem}"
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError("a Python file (.py) is needed")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with _registering(registered):
            spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise PluginLoadError(
            f"parser plug-in {path!r} could not be imported: {type(error).__name__}: {error}"
        ) from error
    return registered


def resolve(name: str, found: type | tuple[str, str]) -> type:
    """A registered class, imported if it was registered by name.

    Raises:
        PluginLoadError: it cannot be imported.
    """
    if isinstance(found, type):
        return found
    module, attribute = found
    try:
        loaded: type = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise PluginLoadError(
            f"parser {name!r} ({module}:{attribute}) could not be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    return loaded


__all__ = [
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "ExtractedToolCallInformation",
    "FunctionCall",
    "ReasoningParser",
    "ReasoningParserManager",
    "ToolCall",
    "ToolParser",
    "ToolParserManager",
]
