"""Templates that the operator brings, on every way in: files, inline text, batches, ``LLM``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from forks import run_command
from pooling_checkpoints import qwen3
from servers import PATIENCE, serving

import headrace_demo
from headrace_testing.sampling import todays

EXAMPLES = Path(__file__).parents[1] / "examples"
CHATS = sorted(
    path.name for path in EXAMPLES.glob("*.jinja") if not path.name.startswith("score_template_")
)
SCORES = sorted(path.name for path in EXAMPLES.glob("score_template_*.jinja"))
HERMES = EXAMPLES / "tool_chat_template_hermes.jinja"
INLINE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "What is 12 + 7?"}]
TOOLS = [
    {"type": "function",
     "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
]  # fmt: skip


def chat(server: Any, **body: Any) -> dict[str, Any]:
    """An answer, and its prompt as text."""
    asked = {"messages": MESSAGES, "max_tokens": 2, "return_token_ids": True, **body}
    answer = httpx.post(f"{server.api}/chat/completions", json=asked, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    ids = {"tokens": made["prompt_token_ids"]}
    made["prompt"] = httpx.post(f"{server.url}/detokenize", json=ids).json()["prompt"]
    return made


def is_hermes(prompt: str) -> bool:
    return prompt.startswith("<|im_start|>") and prompt.endswith("<|im_start|>assistant\n")


def test_a_file_is_the_template_of_every_chat_route() -> None:
    with serving("--chat-template", str(HERMES)) as server:
        answer = chat(server)
        assert is_hermes(answer["prompt"])
        model = answer["model"]
        for path, body in {
            "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
            "/v1/messages": {"model": model, "messages": MESSAGES, "max_tokens": 2},
            "/v1/messages/count_tokens": {"model": model, "messages": MESSAGES},
            "/tokenize": {"messages": MESSAGES},
        }.items():
            answer = httpx.post(server.url + path, json=body, timeout=PATIENCE)
            assert answer.status_code == 200, (path, answer.text)
        body = {"messages": MESSAGES, "chat_template": INLINE}
        refused = httpx.post(f"{server.api}/chat/completions", json=body, timeout=PATIENCE)
        assert refused.status_code == 400, "a client's template needs trust all the same"
        assert refused.json()["error"]["param"] == "chat_template"


def test_each_template_of_the_examples_is_served(tmp_path: Path) -> None:
    """Behind one port, each as the template of a model of its own."""
    chats = todays(CHATS, days=3)
    models = tmp_path / "models.json"
    entries = [
        {"name": name, "model": str(headrace_demo.model_path()), "max_num_seqs": 2,
         "chat_template": str(EXAMPLES / name), "kv_cache_memory_bytes": "16M"}
        for name in chats
    ]  # fmt: skip
    models.write_text(json.dumps(entries))
    with serving("--models-config", str(models)) as server:
        for name in chats:
            asked = {"model": name, "messages": MESSAGES, "max_tokens": 2}
            answer = httpx.post(f"{server.api}/chat/completions", json=asked, timeout=PATIENCE)
            assert answer.status_code == 200, (name, answer.text)


def test_inline_text_with_the_engine_in_a_process_of_its_own() -> None:
    with serving("--chat-template", INLINE, "--engine-process") as server:
        assert chat(server)["prompt"] == "<user> What is 12 + 7?\n"


def test_a_trusted_clients_template_wins_over_the_operators() -> None:
    words = ("--chat-template", INLINE, "--trust-request-chat-template")
    with serving(*words) as server:
        assert chat(server)["prompt"] == "<user> What is 12 + 7?\n"
        mine = chat(server, chat_template="[{{ messages[0].content }}]")
        assert mine["prompt"] == "[What is 12 + 7?]"


def test_a_batch_takes_it(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    body = {"messages": MESSAGES, "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source.write_text(json.dumps(line) + "\n")
    words = ["run-batch", "-i", str(source), "-o", str(output), "--chat-template", str(HERMES)]
    done = run_command(*words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(output.read_text())
    assert answer["error"] is None, answer
    assert answer["response"]["status_code"] == 200, answer


@pytest.fixture(scope="module")
def llm() -> Any:
    from headrace import LLM

    with LLM(max_num_seqs=4) as made:
        yield made


@pytest.mark.parametrize("name", CHATS)
def test_an_offline_chat_takes_each_template_of_the_examples(llm: Any, name: str) -> None:
    from headrace import SamplingParams

    source = (EXAMPLES / name).read_text(encoding="utf-8")
    params = SamplingParams(max_tokens=2, temperature=0)
    tools = TOOLS if "tool" in name else None
    [output] = llm.chat(MESSAGES, params, chat_template=source, tools=tools, use_tqdm=False)
    assert output.outputs[0].token_ids
    assert "What is 12 + 7?" in output.prompt
    if tools:
        assert "Adds." in output.prompt


def test_an_offline_chat_renders_in_the_sandbox(llm: Any) -> None:
    from headrace_core.errors import RequestError

    with pytest.raises(RequestError, match="the chat template failed"):
        llm.chat(MESSAGES, chat_template="{{ messages.__class__.__mro__ }}", use_tqdm=False)
    with pytest.raises(RequestError, match="line 1"):
        llm.chat(MESSAGES, chat_template="{% if %}", use_tqdm=False)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from headrace import LLM

    folder = tmp_path_factory.mktemp("reranker")
    qwen3(folder)
    (folder / "modules.json").unlink()
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["fox", "dog"],
        "is_original_qwen3_reranker": True,
        "max_position_embeddings": 1024,
    }
    with LLM(str(folder), hf_overrides=overrides, dtype="float32") as made:
        yield made


@pytest.mark.parametrize("name", SCORES)
def test_scores_take_each_template_of_the_examples(reranker: Any, name: str) -> None:
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    [plain] = reranker.score("a fox", ["a dog"], chat_template="{{ messages[0].content }}")
    [scored] = reranker.score("a fox", ["a dog"], chat_template=source)
    assert len(scored.prompt_token_ids) > len(plain.prompt_token_ids)
    assert 0 <= scored.outputs.score <= 1


# Before anything is loaded

BROKEN = {
    "no-such-file.jinja": "must be an existing file or a Jinja template",
    "{% for m in messages %}{{ m.content }}": "line 1",
    "{{ messages[0].nothing.deeper }}": "nothing",
    "{{ raise_exception('never') }}": "never",
    "x" * 300: "must be an existing file or a Jinja template",
}


def refused(*words: str) -> str:
    """The last lines of a command line that is refused."""
    done = run_command(*words)
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO ")]
    assert len(said) <= 3, done.stderr
    assert "--chat-template" in done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("template", BROKEN)
def test_a_broken_template_is_refused_before_weights_are_read(template: str) -> None:
    assert BROKEN[template] in refused("serve", "--port", "0", "--chat-template", template)


def test_every_command_refuses_it(tmp_path: Path) -> None:
    bad, models, source = "{% if %}", tmp_path / "models.json", tmp_path / "in"
    source.write_text("")
    models.write_text(json.dumps([{"name": "a", "model": "demo", "chat_template": bad}]))
    output = str(tmp_path / "out")
    assert "line 1" in refused("serve", "--api-server-count", "2", "--chat-template", bad)
    assert "model 'a'" in refused("serve", "--models-config", str(models))
    assert "line 1" in refused("run-batch", "-i", str(source), "-o", output, "--chat-template", bad)


def test_a_file_in_one_line_that_is_long() -> None:
    long = "{# " + "x" * 400 + " #}" + INLINE
    with serving("--chat-template", long) as server:
        assert chat(server)["prompt"] == "<user> What is 12 + 7?\n"


def test_a_checkpoints_own_broken_template_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(headrace_demo.model_path(), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].nothing.deeper }}")
    with serving(str(folder)) as server:
        [line] = [line for line in server.log if "chat template" in line]
        assert "WARNING" in line
        assert "--chat-template" in line
        body = {"prompt": "Hello", "max_tokens": 2}
        answer = httpx.post(f"{server.api}/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200
        answer = httpx.post(
            f"{server.api}/chat/completions", json={"messages": MESSAGES}, timeout=PATIENCE
        )
        assert answer.status_code == 400
