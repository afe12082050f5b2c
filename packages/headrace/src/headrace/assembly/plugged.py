"""Plug-ins that a configuration names and that both sides of an engine may need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.assembly.io_processors import load_io_processor
from headrace.assembly.logits_processors import load_processors
from headrace.assembly.missing_packages import missing
from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.pooling.io_processor import IOProcessor
from headrace_engine.config import EngineConfig, StructuredOutputsConfig

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.sampling.logits_processor import LogitsProcessor
    from headrace_core.text import ReasoningParser, Tokenizer, TokenizerFactory
    from headrace_engine.startup import StartupTimeline


def logits_processors(
    config: EngineConfig, timeline: StartupTimeline
) -> tuple[type[LogitsProcessor], ...]:
    """Classes of the processors that the engine runs; () costs nothing."""
    wanted = config.model.logits_processors
    if not wanted and not plugins.installed("headrace.logits_processors"):
        return ()
    with timeline.phase("import logits processors"):
        return load_processors(wanted)


def reasoning_parser(config: StructuredOutputsConfig) -> type[ReasoningParser] | None:
    """The class that knows where the model's reasoning begins and ends; None: no reasoning.

    Raises:
        PluginError: there is no such parser.
        MissingDependency: it is in a file, which the server's package reads.
    """
    name, file = config.reasoning_parser, config.reasoning_parser_plugin
    if not name:
        return None
    if not file:
        found: type[ReasoningParser] = plugins.load("headrace.reasoning_parsers", name)
        return found
    try:
        from headrace_server.parsing.registry import load_parsers
        from headrace_server.settings import ServerSettings
    except ImportError as error:
        raise missing(error) from error
    named: dict[str, Any] = {"reasoning_parser": name, "reasoning_parser_plugin": file}
    return load_parsers(ServerSettings(**named)).reasoning


def io_processor_class(resolved: ResolvedConfig) -> type[IOProcessor] | None:
    """The plug-in that stands between a pooling model and its callers: the one that is asked for, else
    the one that ``config.json`` names; None: neither, or the model generates.

    Raises:
        ConfigError: one is asked for, and the model does not pool.
        PluginError: there is no such plug-in, or it cannot be used.
    """
    info, asked = resolved.info, resolved.config.model.io_processor_plugin
    if asked and info.runner != "pooling":
        raise ConfigError(
            f"model.io_processor_plugin = {asked!r}: must be left out for {info.architecture}, which "
            f"runs as a generator (runner {info.runner}); --runner pooling makes it pool",
            field="model.io_processor_plugin",
        )
    name = asked or info.config.get("io_processor_plugin")
    return load_io_processor(name) if name and info.runner == "pooling" else None


def read_tokenizer(resolved: ResolvedConfig) -> Tokenizer | None:
    """The tokenizer plug-in's reading of the checkpoint's (or the named) folder, or what Mistral's
    ``tekken.json``, Kimi's ``tiktoken.model`` or a GGUF file says of its tokenizer."""
    from headrace_models.checkpoint.lfs import refuse_pointers
    from headrace_models.checkpoint.regular_file import refuse_special_files
    from headrace_models.checkpoint.source import fetch
    from headrace_models.formats.gguf.files import gguf_file
    from headrace_models.formats.tekken import TEKKEN
    from headrace_models.formats.tiktoken import TIKTOKEN

    model = resolved.config.model
    if model.skip_tokenizer_init:
        return None
    folder = resolved.info.path
    if model.tokenizer is not None:
        folder = fetch(
            model.tokenizer, revision=None, token=model.hf_token,
            offline=resolved.config.load.offline,
        )  # fmt: skip
        refuse_special_files(folder, weights=False)
        refuse_pointers(folder, weights=False)
    if model.tokenizer_mode == "auto" and not (folder / "tokenizer.json").is_file():
        if (folder / TEKKEN).is_file():
            return _of_tekken(folder / TEKKEN)
        if (folder / TIKTOKEN).is_file():
            return _of_tiktoken(folder / TIKTOKEN)
        file = gguf_file(folder)
        if file is not None:
            return _of_gguf(file)
    name = "hf" if model.tokenizer_mode == "auto" else model.tokenizer_mode
    factory: TokenizerFactory = plugins.load("headrace.tokenizers", name)
    return factory(folder)


def _of_tekken(file: Path) -> Tokenizer:
    from headrace_engine.input_processing.tokenizer import tokenizer_of
    from headrace_models.formats.tekken import tekken_tokenizer

    found = tekken_tokenizer(file)
    return tokenizer_of(file, found.tokenizer, found.config)


def _of_tiktoken(file: Path) -> Tokenizer:
    from headrace_engine.input_processing.tokenizer import tokenizer_of
    from headrace_models.formats.tiktoken import tiktoken_tokenizer

    found = tiktoken_tokenizer(file)
    return tokenizer_of(file, found.tokenizer, found.config)


def _of_gguf(file: Path) -> Tokenizer:
    from headrace_engine.input_processing.tokenizer import tokenizer_of
    from headrace_models.formats.gguf.header import read_gguf
    from headrace_models.formats.gguf.tokenizer import gguf_tokenizer

    found = gguf_tokenizer(file, read_gguf(file).metadata)
    return tokenizer_of(file, found.tokenizer, found.config)
