"""Chat templates: what they see, what they may not do, and where they run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.request import ChatPrompt
from headrace_engine.input_processing.chat import sandbox
from headrace_engine.input_processing.chat import template as template_module
from headrace_engine.input_processing.chat.content import normalize_messages
from headrace_engine.input_processing.chat.content_format import detect_content_format
from headrace_engine.input_processing.chat.render_worker import (
    RenderFailed,
    RenderTimeout,
    RenderWorker,
)
from headrace_engine.input_processing.chat.sandbox import render_template
from headrace_engine.input_processing.chat.template import ChatRenderer

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
)
SHOW = "{% macro show(content) %}{% for part in content %}{% endfor %}{% endmacro %}"
LOOP = "{% for m in messages %}{% for p in PARTS %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}"
)
USER = {"role": "user", "content": "hi"}


class FakeTokenizer:
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}  # noqa: RUF012
    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, template: str | None = CHATML, **named: str) -> None:
        self.chat_template = template
        self.chat_templates = named


def renderer(default: str | None = CHATML, **options: Any) -> ChatRenderer:
    named = options.pop("named", {})
    return ChatRenderer(FakeTokenizer(default, **named), **options)  # type: ignore[arg-type]


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return renderer(template).render(ChatPrompt(messages or (USER,), **options)).text


@pytest.fixture(scope="module")
def worker() -> Iterator[RenderWorker]:
    made = RenderWorker(seconds=1.0)
    yield made
    made.close()


def test_plain_chat() -> None:
    system = {"role": "system", "content": "be brief"}
    assert render(CHATML, system, USER) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not render(CHATML, USER, add_generation_prompt=False).endswith("assistant\n")


def test_conventions() -> None:
    """Trimmed blocks, loop controls, unescaped JSON, the generation mark, today's date."""
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') }}{{ bos_token }}{{ undefined_name }}"
    )
    text = render(source, {"role": "user", "content": "<é&>"}, USER)
    assert text == json.dumps(
        {"role": "user", "content": "<é&>"}, ensure_ascii=False
    ) + time.strftime("%Y") + "<s>"  # fmt: skip


def test_marks_around_generations() -> None:
    """Asked for: written in macros and set blocks, too. Else: nothing, and no keyword can ask for them."""
    source = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% set all %}{% for m in messages %}{{ m.role }}={{ say(m) }};{% endfor %}{% endset %}{{ all }}"
    )
    prompt = ChatPrompt((USER, {"role": "assistant", "content": "yes"}))
    rendered = renderer(source).render(prompt, generation_marks=("<", ">"))
    assert rendered.text == "user=<hi>;assistant=<yes>;"
    assert renderer(source).render(prompt).text == "user=hi;assistant=yes;"
    for name in ("_generation_begin", "_generation_end"):
        with pytest.raises(RequestError, match=name):
            render(source, chat_template_kwargs={name: "<"})


def test_tools_documents_and_keywords() -> None:
    source = "{{ tools | tojson }}{{ documents[0].text }}{{ enable_thinking }}{{ tools is none }}"
    text = render(
        source, tools=[{"type": "function"}], documents=[{"text": "doc"}],
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert text == '[{"type": "function"}]docFalseFalse'
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


@pytest.mark.req("SEC-05")
@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception",
             "chat_template", "tokenize", "namespace"]
)  # fmt: skip
def test_keywords_may_not_shadow(name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        render(CHATML, chat_template_kwargs={name: "mine"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_continuing_the_last_message() -> None:
    answer = {"role": "assistant", "content": "Once upon a time "}
    text = render(CHATML, USER, answer, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon a time ")
    trimming = CHATML.replace("message.content", "message.content | trim")
    text = render(trimming, USER, answer, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("Once upon a time")
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render(CHATML, USER, answer, continue_final_message=True)
    with pytest.raises(RequestError, match="last message"):
        render("else", USER, add_generation_prompt=False, continue_final_message=True)


def test_which_template() -> None:
    named = {"tool_use": "T", "rag": "R"}
    prompt = ChatPrompt([USER])
    with_tools = ChatPrompt([USER], tools=[{}])
    assert renderer("D", named=named).render(prompt).text == "D"
    assert renderer("D", named=named).render(with_tools).text == "T"
    assert renderer("D", named=named, template="O").render(with_tools).text == "O"
    assert renderer("D", named=named).render(ChatPrompt([USER], chat_template="rag")).text == "R"
    with pytest.raises(RequestError, match="no chat template"):
        renderer(None).render(prompt)


@pytest.mark.req("SEC-05")
def test_request_templates_need_trust_and_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ChatPrompt([USER], chat_template="{{ messages[0].content }}!")
    with pytest.raises(RequestError, match="refused") as caught:
        renderer().render(prompt)
    assert caught.value.param == "chat_template"
    trusting = renderer(prompt_templates="isolated")

    def here(*_: object) -> str:
        raise AssertionError("rendered in this process")

    monkeypatch.setattr(sandbox, "render_template", here)
    assert trusting.render(prompt).text == "hi!"
    trusting.close()


def test_a_trusted_caller_s_template_renders_like_the_operator_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = renderer(prompt_templates="trusted")
    monkeypatch.setattr(made._worker, "render", None)
    prompt = ChatPrompt([USER], chat_template="{{ messages[0].content }}!")
    assert made.render(prompt).text == "hi!"
    with pytest.raises(RequestError, match="unsafe"):
        made.render(ChatPrompt([USER], chat_template="{{ messages.__class__.mro() }}"))


def test_large_inputs_render_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "WORKER_ABOVE", 1000)
    made = renderer()
    monkeypatch.setattr(sandbox, "render_template", lambda *_: "here")
    assert made.render(ChatPrompt([USER])).text == "here"
    big = {"role": "user", "content": "é" * 2000}
    assert "é" * 2000 in made.render(ChatPrompt([big])).text
    made.close()


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''['__class__'] }}",
    "{{ ('%s' | format(''.__class__)) }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': ''}) }}",
    "{% for x in [].__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ messages[0].__reduce__() }}",
    "{{ (messages | map(attribute='__class__')) | list }}",
    "{{ (1).__class__.__bases__ }}",
    "{{ [].append.__self__.__class__ }}",
    "{{ (messages | first)['__class__'] }}",
    "{{ request.application.__globals__ }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ messages.clear() }}",
]


@pytest.mark.req("SEC-04")
@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source: str) -> None:
    secret = ("<class", "posix", "root:", "uid=", "built-in", "datetime'")
    messages = [{"role": "user", "content": "hi"}]
    params: list[str | None] = []
    try:
        text = renderer(source).render(ChatPrompt(messages)).text
    except RequestError as error:
        text = str(error)
        params.append(error.param)
    assert params in ([], ["messages"])
    assert not any(word in text for word in secret), text
    assert messages == [{"role": "user", "content": "hi"}]


def test_jinja_s_environment_is_made_in_one_place() -> None:
    package = Path(template_module.__file__).parents[1]
    users = [
        path.name
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("Environment(", "from_string("))
    ]
    assert users == ["sandbox.py"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.strip() }}", "undefined|has no"),
        ("{% if %}", "line 1"),
        ("{{ 1 / 0 }}", "cannot be evaluated"),
        ("{{ 'a' * 1000000000 }}", "longer"),
        ("{{ 9 ** 9999999 }}", "exponent"),
        ("{{ '%999999999d' % 1 }}", "formatting"),
        ("{{ [0] * 1000000000 }}", "longer"),
        ("{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "longer than"),
    ],
)
@pytest.mark.req("SEC-05")
@pytest.mark.timeout(60)  # done as asked they take far longer
def test_failures_are_the_request_s(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.req("SEC-05")
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(n) %}{{ f(n - 1) }}{% endfor %}{% endmacro %}{{ f(30) }}",
        DOUBLING,
        "{{ 'x' | center(10 ** 11) }}",
        "{{ '{:>99999999999}'.format(1) }}",
    ],
)
@pytest.mark.timeout(60)
def test_endless_and_huge_templates_are_killed(worker: RenderWorker, source: str) -> None:
    with pytest.raises((RenderTimeout, RenderFailed)):
        worker.render(source, {}, 10_000)
    assert worker.render("fine {{ x }}", {"x": "é"}, 100) == "fine é"


def test_worker_answers_many_threads(worker: RenderWorker) -> None:
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        found[index] = worker.render("{{ n }}" + " " * 10_000, {"n": index}, 100_000)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {i: int(text) for i, text in found.items()} == {i: i for i in range(8)}


def test_worker_ends_with_its_input(worker: RenderWorker) -> None:
    made = RenderWorker()
    assert made.render("x", {}, 10) == "x"
    process = made._process._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    assert made.render("y", {}, 10) == "y"
    made.close()


def test_worker_takes_plain_data_only(worker: RenderWorker) -> None:
    with pytest.raises(RenderFailed, match="JSON"):
        worker.render("{{ x }}", {"x": object()}, 10)


def test_output_cap() -> None:
    assert render_template("{{ 'x' * 10 }}", {}, 10) == "x" * 10


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "string"),
        (PARTS, "openai"),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}",
         "openai"),
        (SHOW + "{% for m in messages %}{{ show(m.content) }}{% endfor %}", "openai"),
        (SHOW + "{% for m in messages %}{{ show(content=m['content']) }}{% endfor %}", "openai"),
        (SHOW + "{% for m in messages %}{{ show(m.name) }}{% endfor %}", "string"),
        (LOOP.replace("PARTS", "m.content | selectattr('type')"), "openai"),
        (LOOP.replace("PARTS", "m.content.split('</think>')"), "string"),
        ("{% for m in messages[::-1] %}{{ m['content'] }}{% endfor %}", "string"),
        ("{% for t in tools %}{{ t.content }}{% endfor %}", "string"),
        ("{% for broken", "string"),
    ],
)  # fmt: skip
def test_detecting_the_content_format(source: str, expected: str) -> None:
    assert detect_content_format(source) == expected


def test_content_in_both_forms() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}, {"type": "refusal", "refusal": "d"}]
    message = {"role": "user", "content": parts}
    assert normalize_messages([message], "string")[0]["content"] == "a\nb\nc\nd"
    whole = normalize_messages([message, USER, {"role": "tool", "content": None}], "openai")
    assert [p["text"] for p in whole[0]["content"]] == ["a", "b", "c", "d"]
    assert whole[1]["content"] == [{"type": "text", "text": "hi"}]
    assert whole[2]["content"] == []
    assert render(PARTS, message) == "[a][b][c][d]"
    assert renderer(PARTS).render(ChatPrompt([USER], content_format="string")).text == "[][]"


def test_tool_calls_get_their_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{% for c in messages[0].tool_calls %}{{ c.function | tojson }}{% endfor %}"
    assert render(source, assistant) == '{"name": "f", "arguments": {"a": 1}}'
    assert call["function"]["arguments"] == '{"a": 1}', "the caller's own was changed"  # type: ignore[index]
    empty = {"role": "assistant", "content": "x", "tool_calls": []}
    assert render("{{ 'tool_calls' in messages[0] }}", empty) == "False"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("text", "messages"),
        (["text"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "a", "tool_calls": [{"function": {"name": ["f"], "arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)  # fmt: skip
def test_malformed_messages(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages(messages, "string")
    assert caught.value.param == param


def test_media_is_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    with pytest.raises(UnsupportedFeature, match="image_url") as caught:
        render(CHATML, {"role": "user", "content": [image]})
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize("trust", ["isolated", "trusted"])
def test_a_requests_own_template_that_fails_is_named(trust: Any) -> None:
    with pytest.raises(RequestError, match=r"^chat_template: the chat template failed: ") as failed:
        renderer("D", prompt_templates=trust).render(
            ChatPrompt([USER], chat_template="{{ raise_exception('no') }}")
        )
    assert failed.value.param == "chat_template"
    with pytest.raises(RequestError, match=r"^messages: the chat template failed: ") as failed:
        renderer("{{ raise_exception('no') }}").render(ChatPrompt([USER]))
    assert failed.value.param == "messages"
