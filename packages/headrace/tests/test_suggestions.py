"""Suggestions for unknown names: near ones, habitual ones, or none."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.arguments import Parser
from headrace.cli.main import run
from headrace.engine_args import ENGINE_OPTIONS, EngineArgs
from headrace.suggestions import _ALIASES, near_names


@pytest.fixture(scope="module")
def flags() -> list[str]:
    from headrace_server.settings import ServerSettings

    parser = EngineArgs.add_cli_args(Parser(prog="test"))
    parser.add_config(ServerSettings, "Frontend")
    return [flag for action in parser._actions for flag in action.option_strings]


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--max-seqs", "--max-num-seqs"),
        ("--max_model_length", "--max-model-len"),
        ("--gpu-mem", "--gpu-memory-utilization"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--tp-size", "--tensor-parallel-size"),
        ("--quant", "--quantization"),
        ("--QUANTISATION", "--quantization"),
        ("--ctx-size", "--max-model-len"),
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        ("--model-path", "--model"),
        ("--alias", "--served-model-name"),
        ("--disable-log-requests", "--no-enable-log-requests"),
        ("--no-enable-prefix-cachin", "--no-enable-prefix-caching"),
        ("--enable-prefix-cachin", "--enable-prefix-caching"),
        ("--seeds", "--seed"),
    ],
)
def test_near_flags(flags: list[str], typed: str, first: str) -> None:
    assert near_names(typed, flags)[:1] == [first]


@pytest.mark.parametrize(
    "typed", ["--iterations", "--banana", "--lora-x", "--x", "--", "--verbose", "--use-v2-block-manager"]
)  # fmt: skip
def test_nothing_is_suggested_where_nothing_is_near(flags: list[str], typed: str) -> None:
    assert near_names(typed, flags) == []


@pytest.mark.parametrize(
    ("typed", "known", "order"),
    [
        ("--max-num", ["--max-answer-numbers", "--max-num-batched-tokens", "--max-num-seqs"],
         ["--max-num-seqs", "--max-num-batched-tokens", "--max-answer-numbers"]),
        ("num_pro", ["max_num_pro", "num_prompts_of_all"], ["num_prompts_of_all", "max_num_pro"]),
        ("temprature", ["temp", "temperature"], ["temperature", "temp"]),
        ("seeds", ["seed-x", "seed"], ["seed", "seed-x"]),
    ],
)  # fmt: skip
def test_names_that_begin_as_typed_come_first(
    typed: str, known: list[str], order: list[str]
) -> None:
    assert near_names(typed, known) == order


def test_suggestions_are_few_and_the_nearest_come_first(flags: list[str]) -> None:
    found = near_names("--max-num", flags)
    assert len(found) == 3
    assert found[0] == "--max-num-seqs"
    assert "--max-num-batched-tokens" in found
    assert near_names("x" * 100_000, flags) == []
    assert near_names("", flags) == []


def test_aliases_are_names_that_we_do_not_have(flags: list[str]) -> None:
    known = {flag.lstrip("-") for flag in flags} | {
        name.replace("_", "-") for name in ENGINE_OPTIONS
    }
    for aliases in _ALIASES.values():
        assert not known & set(aliases)


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("bench", ["latency", "--iterations", "3"], "--iterations. Did you mean --num-iters?"),
        ("generate", ["--iterations", "3"], "unrecognized arguments: --iterations"),
        ("generate", ["--max-new-tokens", "3"], "--max-new-tokens. Did you mean --max-tokens?"),
        ("bench", ["latencies"], "Did you mean 'latency'?"),
        ("serv", [], "Did you mean 'serve'?"),
        ("run_batch", [], "Did you mean 'run-batch'?"),
        ("distill", [], "unknown command 'distill'."),
    ],
)  # fmt: skip
def test_on_the_command_line(
    command: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = run(command, words)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)
