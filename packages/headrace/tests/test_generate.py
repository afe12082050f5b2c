"""``headrace generate``: its lines, its sampling options, and runs over an engine that the test is."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.batch.generating import GenerateRun, JournalWriter, PromptOrderPrinter
from headrace.batch.journal import Journal
from headrace.batch.prompts import Prompt, read_prompts
from headrace.cli.generate import CONSTRAINT_NAMES, SAMPLING_FIELDS, _parser, _sampling_of
from headrace.cli.main import run as run_command
from headrace.progress import prompt_bar
from headrace_core.errors import EngineDead, RequestError
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.sampling.params import SamplingParams, StructuredOutputsParams


def written(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    return str(path)


def test_json_lines_are_checked_one_by_one(tmp_path: Path) -> None:
    lines: list[tuple[str | bytes, str | None]] = [
        ('{"prompt": "a\u2028b", "custom_id": 7}', None),
        ('{"promt": "x"}', "'promt': unknown field; did you mean 'prompt'?"),
        ('{"prompt": "x", "max_tokens": 5}', "'max_tokens': unknown field; fields are prompt, custom_id"),
        ('{"prompt": "x"', "is not valid JSON: Expecting ',' delimiter (column 15)"),
        ('{"prompt": 5}', "prompt = 5: must be there, as text"),
        ('{"custom_id": "x"}', "prompt: must be there, as text"),
        ('{"prompt": "x", "custom_id": [1]}', "custom_id = [1]: must be text or a whole number"),
        ('"x"', "must be a JSON object"),
        ("x", "is not valid JSON"),
        (b'{"prompt": "\xff"}', "is not UTF-8 text: byte 0xff in column 13"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "is nested too deeply; must be a JSON object"),
    ]  # fmt: skip
    file = written(tmp_path / "in.jsonl", *(line for line, _ in lines))
    found = read_prompts(["typed"], file)
    assert found.every[0] == Prompt("typed")
    assert found.every[1] == Prompt("a\u2028b", 1, 7)
    for number, (prompt, (_, fault)) in enumerate(zip(found.every[1:], lines, strict=True), 1):
        assert prompt.line == number
        if fault is not None:
            assert prompt.text is None
            assert fault in (prompt.fault or "")
    assert len(found.faulty) == len(lines) - 1


def test_text_lines_are_prompts_as_they_stand(tmp_path: Path) -> None:
    file = written(tmp_path / "in.txt", b"\xef\xbb\xbffirst ", "", "  second\r", b"\xff", "third")
    found = read_prompts([], file)
    assert [p.text for p in found.every] == ["first ", "  second", None, "third"]
    assert [p.line for p in found.every] == [1, 3, 4, 5]


def test_equal_custom_ids_are_refused_by_number(tmp_path: Path) -> None:
    file = written(
        tmp_path / "in.jsonl",
        '{"prompt": "a", "custom_id": 1}', '{"prompt": "b", "custom_id": "1"}', '{"prompt": "c"}',
        '{"prompt": "d"}', '{"promt": "e", "custom_id": "x"}', '{"prompt": "f", "custom_id": 1}',
        '{"prompt": "g", "custom_id": "x"}',
    )  # fmt: skip
    found = read_prompts(["typed"], file)
    assert [p.text for p in found.every] == ["typed", "a", "b", "c", "d", None, None, None]
    assert [p.line for p in found.faulty] == [5, 6, 7]
    assert found.faulty[0].fault == "'promt': unknown field; did you mean 'prompt'?"
    assert found.faulty[1].fault == "custom_id = 1: must differ from that of line 1"
    assert found.faulty[1].custom_id == 1
    assert found.faulty[2].fault == "custom_id = 'x': must differ from that of line 5"


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", b'\xef\xbb\xbf{"prompt": "a"}', '{"prompt": "b"}')
    assert [p.text for p in read_prompts([], file).every] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "line"), [("in.txt", ' {"prompt": "x"}'), ("in", "{}"), ("in.json", "[")]
)
def test_a_format_is_not_guessed(tmp_path: Path, name: str, line: str) -> None:
    file = written(tmp_path / name, "Hello", line)
    with pytest.raises(RequestError, match=r"line 2 begins with .* --input-format jsonl"):
        read_prompts([], file)
    assert read_prompts([], file, "text").every[1].text == line
    assert read_prompts(["typed"], file, "jsonl").every[1].fault


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for content, form, texts in (
        (b"a\nb", "auto", ["a", "b"]),
        (b'{"prompt": "c"}', "jsonl", ["c"]),
    ):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        assert [p.text for p in read_prompts([], "-", form).every] == texts


@pytest.mark.parametrize("lines", [[], [" "], ["{", '{"x": 1}']])
def test_files_without_a_prompt_are_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(
        RequestError, match=r"in.jsonl: holds no prompts|no line can be used; line 1: is not valid"
    ):
        read_prompts([], written(tmp_path / "in.jsonl", *lines))


def sampled(*words: str) -> dict[str, Any]:
    parsed: Namespace = _parser().parse_args(words)
    return _sampling_of(parsed)


def test_sampling_options_by_name() -> None:
    found = sampled("--max-tokens", "3", "--sampling", '{"top_p": 0.5, "logit_bias": {"5": 1.5}}')
    assert found == {"max_tokens": 3, "top_p": 0.5, "logit_bias": {5: 1.5}}
    found = sampled("--sampling", '{"structured_outputs": {"regex": "a+"}}')
    assert found == {"structured_outputs": StructuredOutputsParams(regex="a+")}
    assert SamplingParams(**found)


@pytest.mark.parametrize(
    ("flag", "value", "field", "other"),
    [("--temperature", "0", "temperature", 1), ("--max-tokens", "3", "max_tokens", 4),
     ("--sampling-seed", "1", "seed", None)],
)  # fmt: skip
def test_a_flag_that_sampling_contradicts(flag: str, value: str, field: str, other: Any) -> None:
    with pytest.raises(
        RequestError, match=f"{field} = {other!r}: contradicts {flag} {value}"
    ) as caught:
        sampled(flag, value, "--sampling", json.dumps({field: other}))
    assert caught.value.param == field
    same = sampled(flag, value, "--sampling", json.dumps({field: float(value)}))
    assert same == {field: float(value)} == sampled("--sampling", json.dumps({field: float(value)}))


def test_short_forms() -> None:
    parsed = _parser().parse_args(["-i", "in.txt", "-o", "out.jsonl"])
    assert (parsed.input, parsed.output) == ("in.txt", "out.jsonl")


def test_a_typed_prompt_is_text() -> None:
    with pytest.raises(RequestError, match="--prompt: character 3 is not UTF-8"):
        read_prompts(["fine", "ab\udcff"], None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"validate": 1}', "--sampling: validate: unknown field; fields are n, "),
        ('{"clone": 1}', "--sampling: clone: unknown field"),
        ('{"output_kind": 1}', "--sampling: output_kind: unknown field"),
        ('{"logprobs": 2}', "--sampling: logprobs: the output has no field for it"),
        ('{"temprature": 1}', "did you mean temperature?"),
        ('{"structured_outputs": {"regx": "a"}}', "structured_outputs.regx: unknown field; did you mean"),
        ('{"structured_outputs": {}}', "exactly one constraint"),
        ('{"regex": "a"}', 'regex: unknown field; send {"structured_outputs": {"regex": ...}}'),
        ('{"guided_json": {}}', 'guided_json: unknown field; send {"structured_outputs": {"json": ...}}'),
        ('{"ebnf": "a"}', 'ebnf: unknown field; send {"structured_outputs": {"grammar": ...}}'),
        ('{"structured_outputs": {"json_schema": {}}}',
         "structured_outputs.json_schema: unknown field; did you mean json?"),
        ('{"max_new_tokens": 5}', "max_new_tokens: unknown field; did you mean max_tokens?"),
        ('{"max_output_tokens": 5}', "did you mean max_tokens?"),
        ('{"stop_sequences": ["a"]}', "did you mean stop?"),
        ('{"repeat_penalty": 1.1}', "did you mean repetition_penalty?"),
        ('{"iterations": 1}', "iterations: unknown field; fields are n, "),
    ],
)  # fmt: skip
def test_sampling_options_that_do_not_exist(
    given: str, said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before a model is loaded: there is none of that name."""
    monkeypatch.setattr("headrace.cli.generate.configure", lambda level: None)
    words = ["no/such-model", "--prompt", "x", "--sampling", given]
    assert run_command("generate", words) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_hints_cover_the_server_s_spellings() -> None:
    """The names that a client may give a constraint are known here, too."""
    from headrace_server.requests.constraints import SPELLINGS

    assert SPELLINGS.items() <= CONSTRAINT_NAMES.items()
    known = {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    assert set(CONSTRAINT_NAMES.values()) <= known
    assert not CONSTRAINT_NAMES.keys() & set(SAMPLING_FIELDS)


def test_every_sampling_field_exists() -> None:
    params = SamplingParams()
    assert all(hasattr(params, name) for name in SAMPLING_FIELDS)


class Engine:
    """Answers each prompt with its text twice; the test decides what comes when.

    Prompts that begin with "long" are refused, those with "broken" fail, and at "dead" the engine dies.
    """

    def __init__(self, *, last_first: bool = False) -> None:
        self.asked: list[str] = []
        self.most_at_once = 0
        self._last_first = last_first
        self._waiting: list[tuple[str, Any]] = []

    def open_call(self) -> Engine:
        return self

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()

    def add_request(self, request_id: str, prompt: Any, params: Any, *, call: Any) -> None:
        text = prompt if isinstance(prompt, str) else prompt.messages[0]["content"]
        if text.startswith("long"):
            raise RequestError("prompt: too long", param="prompt")
        self.asked.append(text)
        self._waiting.append((request_id, text))
        self.most_at_once = max(self.most_at_once, len(self._waiting))

    def wait(self) -> list[Any]:
        request_id, text = self._waiting.pop(-1 if self._last_first else 0)
        if text == "dead":
            raise EngineDead("gone")
        reason = "error" if text.startswith("broken") else "stop"
        part = CompletionOutput(index=0, text=2 * text, token_ids=[1, 2], finish_reason=reason)
        output = RequestOutput(
            request_id=request_id, prompt=text, prompt_token_ids=[1], outputs=[part], finished=True,
            prompt_logprobs=None,
        )  # fmt: skip
        return [SimpleNamespace(request_id=request_id, output=output, finished=True, error=None)]


def run(engine: Engine, answers: Any, prompts: list[Prompt], **options: Any) -> GenerateRun:
    done: list[int] = []
    made = GenerateRun(engine, SamplingParams(), answers, at_once=2,  # type: ignore[arg-type]
                      done=lambda number, output: done.append(number), **options)  # fmt: skip
    made.run(prompts)
    assert len(done) == len(set(done))
    return made


PROMPTS = [
    Prompt("a", 1),
    Prompt(None, 2, 5, "is bad"),
    Prompt("long", 3),
    Prompt("broken", 4),
    Prompt("b"),
]


@pytest.mark.parametrize("chat", [False, True])
def test_what_is_bad_fails_alone(tmp_path: Path, chat: bool) -> None:
    source = read_prompts(["x"], None).source
    engine = Engine()
    with Journal(tmp_path / "j", source, "m") as journal:
        made = run(engine, JournalWriter(journal), PROMPTS, chat=chat)
        lines = [json.loads(each) for each in journal.outputs()]
    assert engine.asked == ["a", "broken", "b"]
    assert engine.most_at_once == 2
    assert [line.get("prompt") for line in lines] == ["a", None, "long", "broken", "b"]
    assert lines[0]["outputs"] == [{"text": "aa", "finish_reason": "stop", "num_tokens": 2}]
    assert lines[1]["custom_id"] == 5
    assert lines[1]["error"] == {"code": "HR-REQ-001", "message": "line 2: is bad", "line": 2}
    assert [line["error"]["code"] for line in lines[2:4]] == ["HR-REQ-001", "HR-ENG-001"]
    assert [prompt.line for prompt, _ in made.failed] == [2, 3, 4]


def test_a_dead_engine_loses_nothing(tmp_path: Path) -> None:
    source = read_prompts(["x"], None).source
    prompts = [Prompt(text) for text in ("a", "b", "dead", "c")]
    with Journal(tmp_path / "j", source, "m") as journal, pytest.raises(EngineDead):
        run(Engine(), JournalWriter(journal), prompts)
    prompts[2] = Prompt("d")
    engine = Engine()
    with Journal(tmp_path / "j", source, "m") as journal:
        assert journal.num_resumed == 2
        run(engine, JournalWriter(journal), prompts)
        found = [json.loads(each)["prompt"] for each in journal.outputs()]
    assert engine.asked == ["d", "c"]
    assert found == ["a", "b", "d", "c"]


@pytest.mark.parametrize("as_json", [False, True])
def test_answers_are_printed_in_order_as_they_come(as_json: bool) -> None:
    shown: list[str] = []
    run(Engine(last_first=True), PromptOrderPrinter(shown.append, as_json=as_json), PROMPTS)
    if as_json:
        assert [json.loads(text)["prompt"] for text in shown] == ["a", None, "long", "broken", "b"]
    else:
        assert shown == ["aa", "bb"]


def test_the_bar_begins_with_what_is_answered_already() -> None:
    made: dict[str, Any] = {}
    updates: list[int] = []

    def bar(**options: Any) -> Any:
        made.update(options)
        return SimpleNamespace(
            update=updates.append, close=lambda: None, set_postfix_str=lambda *_, **__: None
        )

    with prompt_bar(5, bar, done=2) as show:
        assert show is not None
        show(3, None)
    assert (made["total"], made["initial"], updates) == (5, 2, [1])
