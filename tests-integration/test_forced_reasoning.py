"""Forced calls of models that reason: each pair of parsers that a published checkpoint needs.

A random model is held to a script: in each step the script's next token is by far the likeliest. The
constraint decides whether it may come. So the answer is the script's only where the grammar admits the
model's own format, from the right token on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import constrained
import pytest
from posted import post, stream

from headrace import EngineArgs
from headrace.assembly import connect
from headrace_server import ServerSettings, bind, create_app, serve

MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|start|>", "<|call|>", "<|end|>",
    "<|constrain|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<|tool_call|>",
    "<minimax:tool_call>", "</minimax:tool_call>",
)  # fmt: skip
ARGUMENTS = '{"city": "Oslo"}'
OBJECT = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
THINK = "<think>why</think>\n\n"
FUNCTION = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
STEP = (
    "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>\nfunction<｜tool_sep｜>"
    '<steptml:invoke name="weather"><steptml:parameter name="city">Oslo</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
)
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>"
TO_WEATHER = f" to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
ANALYSIS = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
BEGUN, SKIPPED = "<think>", "<think>\n\n</think>\n\n"


class Case(NamedTuple):
    """An answer of a checkpoint, and how its prompt ends."""

    tools: str
    reasoning: str
    text: str
    """The answer, marks included."""
    opening: str = ""
    """The text that the template writes behind the head of the answer."""
    thought: str = "why"
    switches: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012
    """Fields of a chat."""
    content: str = ""
    """The text beside the calls."""


CASES = [
    Case("hermes", "qwen3", THINK + HERMES),
    Case("hermes", "qwen3", "why</think>\n\n" + HERMES, BEGUN),
    Case("hermes", "qwen3", HERMES, SKIPPED, ""),
    Case("hermes", "qwen3", HERMES, "", ""),
    Case("hermes", "deepseek_r1", "why</think>\n\n" + HERMES, BEGUN),
    Case("hermes", "holo2", "why</think>\n\n" + HERMES, BEGUN),
    Case("hermes", "holo2", HERMES, SKIPPED, "", {"thinking": False}),
    Case("hermes", "holo2", HERMES, "", "", {"thinking": False}),
    Case("qwen3_coder", "qwen3", f"{THINK}<tool_call>\n{FUNCTION}\n</tool_call>"),
    Case("qwen3_coder", "qwen3", f"<tool_call>\n{FUNCTION}\n</tool_call>", SKIPPED, ""),
    Case("qwen3_coder", "deepseek_r1", f"why</think>\n<tool_call>\n{FUNCTION}\n</tool_call>", BEGUN),
    Case("deepseek_v3", "deepseek_r1", "why</think>\n" + V3, BEGUN),
    Case("deepseek_v3", "deepseek_r1", "<think>why</think>\n" + V3),
    Case("deepseek_v31", "deepseek_v3", "why</think>" + V31, BEGUN, "why", {"thinking": True}),
    Case("deepseek_v31", "deepseek_v3", V31, "</think>", ""),
    Case("deepseek_v31", "deepseek_v3", V31, "", ""),
    Case("deepseek_v32", "deepseek_v3", f"why</think>\n\n{DSML}", BEGUN, "why", {"thinking": True}),
    Case("deepseek_v32", "deepseek_v3", DSML, "</think>", ""),
    Case("glm45", "glm45", f"\n<think>why</think>\n{GLM}"),
    Case("glm45", "glm45", f"\n{GLM}", "\n<think></think>", ""),
    Case("glm47", "glm45", f"why</think>{GLM}", BEGUN),
    Case("glm47", "glm45", GLM, "</think>", ""),
    Case("minimax_m2", "minimax_m2", f"why\n</think>\n\n{MINIMAX}", "<think>\n", "why\n"),
    Case("minimax_m2", "minimax_m2_append_think", f"why</think>\n\n{MINIMAX}", "<think>\n", "",
         content="why"),  # its marks are special tokens, which clients do not see
    Case("minimax_m2", "minimax_m2_append_think", f"why</think>\n\n{MINIMAX}", "<think>\n", "",
         options={"skip_special_tokens": False}, content="<think>why</think>"),
    Case("minimax_m2", "minimax_m2_append_think", MINIMAX, "<think>\n\n</think>\n\n", ""),
    Case("kimi_k2", "kimi_k2", "<think>why</think>" + KIMI),
    Case("kimi_k2", "kimi_k2", KIMI, "<think></think>", ""),
    Case("step3", "step3", f"why\n</think>\n{STEP}", "<think>\n", "why\n"),
    Case("seed_oss", "seed_oss",
         f"<seed:think>why</seed:think><seed:tool_call>\n{FUNCTION}\n</seed:tool_call>"),
    Case("seed_oss", "seed_oss", f"<seed:tool_call>\n{FUNCTION}\n</seed:tool_call>",
         "<seed:think>none</seed:think>", ""),
    Case("ernie45", "ernie45", f"why\n</think>\n\n\n{HERMES}\n", "<think>\n"),
    Case("hunyuan_a13b", "hunyuan_a13b",
         f"<think>\nwhy\n</think>\n<tool_calls>[{OBJECT}]</tool_calls>"),
    Case("hunyuan_a13b", "hunyuan_a13b", f"<tool_calls>[{OBJECT}]</tool_calls>",
         "<think>\n\n</think>\n", ""),
    Case("granite", "granite", f"<|tool_call|>[{OBJECT}]", "", ""),
    Case("hermes", "granite", HERMES, "", ""),
    Case("mistral", "mistral", f"[THINK]why[/THINK][TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    Case("mistral", "mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", ""),
    Case("olmo3", "olmo3",
         'why</think><function_calls>weather(city="Oslo")</function_calls>', BEGUN,
         options={"skip_special_tokens": False}),  # its marks are ordinary text
    Case("openai", "openai_gptoss", f"{ANALYSIS}<|channel|>commentary{TO_WEATHER}",
         "<|start|>assistant"),
    Case("openai", "openai_gptoss", f"<|channel|>commentary{TO_WEATHER}", "<|start|>assistant", ""),
    Case("openai", "openai_gptoss",
         f"{ANALYSIS} to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
         f"{ARGUMENTS}<|call|>", "<|start|>assistant"),
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ opening }}{% endif %}"
)
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {"name": "weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("scripted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constrained, "SPECIAL", [*constrained.SPECIAL, *MARKS])
        constrained.save(folder)
    config = folder / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "max_position_embeddings": 2048}))
    words = folder / "tokenizer_config.json"
    words.write_text(json.dumps({**json.loads(words.read_text()), "chat_template": TEMPLATE}))
    return str(folder)


class Served:
    """One engine with a reasoning parser, and a server on a port of its own for each tool parser."""

    def __init__(self, folder: str, reasoning: str, tools: list[str]) -> None:
        grammars = constrained.UNHURRIED["structured_outputs_config"]
        values = {
            "max_model_len": 2048, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20,
            "structured_outputs_config": {**grammars, "reasoning_parser": reasoning},
            "logits_processors": ["processors:Scripted"],
        }  # fmt: skip
        self._config = EngineArgs(
            model=folder, served_model_name=("scripted",), **constrained.UNHURRIED | values
        ).create_engine_config()
        self._reasoning, self._tools = reasoning, tools
        self.urls: dict[str, str] = {}
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        engine = connect(self._config)
        tasks = []
        for name in self._tools:
            settings = ServerSettings(
                port=0, enable_auto_tool_choice=True, tool_call_parser=name, drain_timeout=0,
                reasoning_parser=self._reasoning, uvicorn_log_level="warning",
            )  # fmt: skip
            app, sock = create_app(engine, settings), bind(settings)
            self.urls[name] = f"http://127.0.0.1:{sock.getsockname()[1]}"
            tasks.append(asyncio.create_task(serve(app, sock, settings)))
        self._ready.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.shutdown()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


BY_REASONING = {
    case.reasoning: [c for c in CASES if c.reasoning == case.reasoning] for case in CASES
}


@pytest.fixture(scope="module", params=BY_REASONING)
def served(request: pytest.FixtureRequest, checkpoint: str) -> Iterator[tuple[Served, list[Case]]]:
    cases = BY_REASONING[request.param]
    made = Served(checkpoint, request.param, sorted({case.tools for case in cases}))
    yield made, cases
    made.close()


class Answer(NamedTuple):
    """An answer as a client gets it."""

    calls: list[tuple[str, Any]]
    reasoning: str
    content: str
    reason: str


def chat(url: str, case: Case, choice: Any) -> Answer:
    """Ask the chat route; whole and streamed answers must be the same."""
    whole = post(url + "/v1/chat/completions", _chat_body(url, case, choice))["choices"][0]
    said = whole["message"]
    calls = [c["function"] for c in said.get("tool_calls") or []]
    found = Answer(
        [(c["name"], c["arguments"]) for c in calls],
        said.get("reasoning") or "", said["content"] or "", whole["finish_reason"],
    )  # fmt: skip
    pieces: list[list[str]] = []
    reasoning = content = reason = ""
    for event in stream(url + "/v1/chat/completions", _chat_body(url, case, choice)):
        for part in event["choices"]:
            delta = part["delta"]
            reasoning += delta.get("reasoning") or ""
            content += delta.get("content") or ""
            reason = part["finish_reason"] or reason
            for piece in delta.get("tool_calls", []):
                if "name" in piece["function"]:
                    pieces.append([piece["function"]["name"], ""])
                pieces[piece["index"]][1] += piece["function"].get("arguments", "")
    assert ([tuple(one) for one in pieces], reasoning, content, reason) == found
    return found._replace(calls=[(name, json.loads(text)) for name, text in found.calls])


def _chat_body(url: str, case: Case, choice: Any) -> dict[str, Any]:
    return {
        "model": "scripted", "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": WEATHER}], "tool_choice": choice,
        **_common(url, case), "max_tokens": 600, **case.options,
    }  # fmt: skip


def _common(url: str, case: Case) -> dict[str, Any]:
    body = {"model": "scripted", "prompt": case.text, "add_special_tokens": False}
    script = post(url + "/tokenize", body)["tokens"]
    return {
        "temperature": 0,
        "chat_template_kwargs": {"opening": case.opening, **case.switches},
        "headrace_xargs": {"script": [*script, constrained.EOS]},
    }


@pytest.mark.keep(6, every_value=False)
def test_forced_calls_behind_the_reasoning(served: tuple[Served, list[Case]]) -> None:
    """The model's own call, and its reasoning, for both kinds of forced choice."""
    server, cases = served
    expected = [("weather", {"city": "Oslo"})]
    failures = []
    for case in cases:
        for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
            try:
                said = chat(server.urls[case.tools], case, choice)
            except AssertionError as error:
                failures.append((case, choice, str(error)[:400]))
                continue
            if said != (expected, case.thought, case.content, reason):
                failures.append((case, choice, said))
    assert not failures, "\n\n".join(map(str, failures))


FREELY = {"type": "adaptive"}


def responses(url: str, case: Case, choice: Any) -> tuple[list[Any], str]:
    """Calls and reasoning of a response; whole and streamed answers must be the same."""
    body = {
        "model": "scripted", "input": "Hi", "tools": [{"type": "function", **WEATHER}],
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": "weather"},
        **_common(url, case), "max_output_tokens": 600,
    }  # fmt: skip
    whole = post(url + "/v1/responses", body)
    last = stream(url + "/v1/responses", body)[-1]
    assert last["type"] == "response.completed"
    found = [_items(answer["output"]) for answer in (whole, last["response"])]
    assert found[0] == found[1]
    return found[0]


def _items(output: list[Any]) -> tuple[list[Any], str]:
    assert {item["type"] for item in output} <= {"function_call", "reasoning"}
    calls = [item for item in output if item["type"] == "function_call"]
    thoughts = [part["text"] for item in output for part in item.get("content") or ()]
    return [(c["name"], json.loads(c["arguments"])) for c in calls], "".join(thoughts)


def messages(
    url: str, case: Case, choice: Any, thinking: Any = FREELY, max_tokens: int = 600
) -> tuple[list[Any], str]:
    """The same of Anthropic's messages."""
    body = {
        "model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": max_tokens,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"} if choice == "required" else {"type": "tool", "name": "weather"},
        **_common(url, case), "thinking": thinking,
    }  # fmt: skip
    whole = post(url + "/v1/messages", body)
    assert whole["stop_reason"] == "tool_use"
    blocks = whole["content"]
    assert {block["type"] for block in blocks} <= {"tool_use", "thinking"}
    arguments = thoughts = ""
    for event in stream(url + "/v1/messages", body):
        delta = event.get("delta", {})
        arguments += delta.get("partial_json", "")
        thoughts += delta.get("thinking", "")
    calls = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    assert (json.loads(arguments), thoughts) == (calls[0][1], thought)
    return calls, thought


@pytest.mark.parametrize("served", ["qwen3", "openai_gptoss"], indirect=True, scope="module")
def test_the_other_protocols(served: tuple[Served, list[Case]]) -> None:
    server, cases = served
    for case in cases:
        for choice in ("required", NAMED):
            for ask in (responses, messages):
                found = ask(server.urls[case.tools], case, choice)
                assert found == ([("weather", {"city": "Oslo"})], case.thought), (ask, case)


@pytest.mark.parametrize("served", ["openai_gptoss"], indirect=True, scope="module")
def test_strict_calls_of_gpt_oss(served: tuple[Served, list[Case]]) -> None:
    """Free calls whose arguments follow the schema, and an answer without calls."""
    server, cases = served
    url = server.urls["openai"]
    answer = cases[0]._replace(text=f"{ANALYSIS}<|channel|>final<|message|>Hello")
    wrong = cases[0]._replace(text=cases[0].text.replace("city", "town"))
    for case, called in ((cases[0], True), (answer, False), (wrong, None)):
        body = _chat_body(url, case, "auto")
        body["tools"][0]["function"] = {**WEATHER, "strict": True}
        choice = post(url + "/v1/chat/completions", body)["choices"][0]
        said = choice["message"]
        assert said["reasoning"] == "why"
        if called is None:
            assert "town" not in said["tool_calls"][0]["function"]["arguments"]
        elif called:
            assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
        else:
            assert (said.get("tool_calls") or [], said["content"]) == ([], "Hello")


@pytest.mark.parametrize("served", ["qwen3", "openai_gptoss"], indirect=True, scope="module")
def test_a_budget_ends_the_thought_before_the_call(served: tuple[Served, list[Case]]) -> None:
    """The model would go on thinking: another token stands in the script where the thought must end."""
    server, cases = served
    case = cases[0]
    ends = {"openai_gptoss": "<|end|>", "qwen3": "</think>"}
    url = server.urls[case.tools]
    before, after = case.text.split(ends[case.reasoning])
    parts = [before.removesuffix("why"), "why", "x", after]
    tokens = [
        post(url + "/tokenize", {"prompt": part, "add_special_tokens": False})["tokens"]
        for part in parts
    ]
    for choice in ("required", NAMED):
        body = _chat_body(url, case, choice)
        body["headrace_xargs"]["script"] = [*itertools.chain(*tokens), constrained.EOS]
        body["thinking_token_budget"] = len(tokens[1])
        said = post(url + "/v1/chat/completions", body)["choices"][0]["message"]
        [call] = said["tool_calls"]
        assert (said["reasoning"], said["content"]) == ("why", None)
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    enabled = {"type": "enabled", "budget_tokens": 1024}
    found = messages(url, case, NAMED, enabled, max_tokens=1025)
    assert found == ([("weather", {"city": "Oslo"})], "why")
