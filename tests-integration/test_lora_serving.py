"""Adapters of a real server: real engine, sockets and clients."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from forks import run_command
from lora_adapters import demo_adapter, demo_folder
from servers import RunningServer, serving

from headrace import LLM, SamplingParams
from headrace.lora import LoRARequest

Example = Callable[..., list[str]]
KEY = "operators-key"
FLAGS = (
    "--dtype", "float32", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4",
    "--allow-runtime-lora-updating", "--api-key", KEY, "--enforce-eager", "--max-num-seqs", "16",
)  # fmt: skip
BASE, PROMPTS = "headrace-demo", ("What is 12 + 7?", "Hello! What can you do?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters: ``one``, ``two``, ``three``; ``large`` has too high a rank."""
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        demo_adapter(made / name, seed)
    demo_adapter(made / "large", 9, rank=64)
    (made / "found").mkdir()
    return made


@pytest.fixture(scope="module")
def offline(folder: Path) -> dict[str, list[str]]:
    """What the models write offline, by name."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(demo_folder(), dtype="float32", enable_lora=True, max_loras=1) as llm:
        written = {BASE: [o.outputs[0].text for o in llm.generate(list(PROMPTS), params)]}
        for number, name in enumerate(("one", "two", "three"), 1):
            adapter = LoRARequest(name, number, str(folder / name))
            outputs = llm.generate(list(PROMPTS), params, lora_request=adapter)
            written[name] = [output.outputs[0].text for output in outputs]
    assert len({tuple(texts) for texts in written.values()}) == 4
    return written


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    modules = ("--lora-modules", f"one={folder / 'one'}", f"two={folder / 'two'}")
    environment = {"HEADRACE_LORA_RESOLVER_CACHE_DIR": str(folder / "found")}
    with serving(*FLAGS, *modules, environment=environment) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key=KEY, max_retries=0) as made:
        yield made


def write(client: openai.OpenAI, model: str, prompt: str, **more: Any) -> str:
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=12, temperature=0, **more
    )
    assert answer.model == model
    return answer.choices[0].text


def change(client: openai.OpenAI, what: str, **body: Any) -> str:
    return client.post(f"/{what}_lora_adapter", body=body, cast_to=str)


def names(client: openai.OpenAI) -> list[str]:
    return [model.id for model in client.models.list()]


def test_side_by_side_as_offline(
    client: openai.OpenAI, offline: dict[str, list[str]], server: RunningServer
) -> None:
    calls = [(name, i) for name in (BASE, "one", "two") for i in range(len(PROMPTS))] * 4
    with ThreadPoolExecutor(len(calls)) as pool:
        texts = list(pool.map(lambda call: write(client, call[0], PROMPTS[call[1]]), calls))
    assert texts == [offline[name][i] for name, i in calls]
    stream = client.completions.create(
        model="two", prompt=PROMPTS[0], max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == offline["two"][0]
    assert names(client) == [BASE, "one", "two"]
    assert server.metric("lora_requests_info") > 0


def test_every_wire(client: openai.OpenAI, server: RunningServer) -> None:
    turn: Any = {"messages": [{"role": "user", "content": PROMPTS[0]}]}
    told = {}
    for name in (BASE, "one"):
        chat = client.chat.completions.create(model=name, temperature=0, max_tokens=12, **turn)
        response = client.responses.create(
            model=name, input=PROMPTS[0], temperature=0, max_output_tokens=12
        )
        with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as other:
            message = other.messages.create(
                model=name, max_tokens=12, extra_body={"temperature": 0}, **turn
            )
        (block,) = message.content
        texts = {chat.choices[0].message.content, response.output_text, block.text}
        assert len(texts) == 1, "one turn, three spellings"
        assert {chat.model, response.model, message.model} == {name}
        told[name] = texts
    assert told[BASE] != told["one"]


def test_load_use_list_unload(
    client: openai.OpenAI, folder: Path, offline: dict[str, list[str]]
) -> None:
    path = str(folder / "three")
    said = change(client, "load", lora_name="extra", lora_path=path)
    assert said.startswith("Success: LoRA adapter 'extra' added successfully")
    assert write(client, "extra", PROMPTS[0]) == offline["three"][0]
    assert names(client) == [BASE, "one", "two", "extra"]
    with pytest.raises(openai.BadRequestError, match="already"):
        change(client, "load", lora_name="extra", lora_path=path)
    other = str(folder / "one")
    change(client, "load", lora_name="extra", lora_path=other, load_inplace=True)
    assert write(client, "extra", PROMPTS[0]) == offline["one"][0]
    change(client, "unload", lora_name="extra")
    assert names(client) == [BASE, "one", "two"]
    with pytest.raises(openai.NotFoundError, match="'extra' is not served"):
        write(client, "extra", PROMPTS[0])


def test_one_that_cannot_be_used(
    client: openai.OpenAI, folder: Path, offline: dict[str, list[str]]
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"64.*16|16.*64"):
        change(client, "load", lora_name="large", lora_path=str(folder / "large"))
    with pytest.raises(openai.NotFoundError):
        change(client, "load", lora_name="none", lora_path=str(folder / "none"))
    assert names(client) == [BASE, "one", "two"]
    assert write(client, "one", PROMPTS[0]) == offline["one"][0]


def test_a_folder_in_which_adapters_are_found(
    client: openai.OpenAI, folder: Path, offline: dict[str, list[str]]
) -> None:
    with pytest.raises(openai.NotFoundError):
        write(client, "three", PROMPTS[0])
    shutil.copytree(folder / "three", folder / "found" / "three")
    shutil.copytree(folder / "large", folder / "found" / "large")
    demo_adapter(folder / "found" / "foreign", 3, base="another")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: write(client, "three", PROMPTS[1]), range(4)))
    assert texts == [offline["three"][1]] * 4
    assert names(client) == [BASE, "one", "two", "three"]
    with pytest.raises(openai.NotFoundError):
        write(client, "foreign", PROMPTS[0])
    with pytest.raises(openai.BadRequestError, match=r"64.*16|16.*64") as caught:
        write(client, "large", PROMPTS[0])
    assert str(folder) not in str(caught.value), "where it lies is not the client's business"
    change(client, "unload", lora_name="three")


def test_examples(server: RunningServer, folder: Path, example: Example) -> None:
    flags = ("--adapter", f"one={folder / 'one'}", "--adapter", f"two={folder / 'two'}")
    lines = example("multilora_inference.py", *flags, "--dtype", "float32", "--enforce-eager")
    names = sorted(line.partition(":")[0] for line in lines)
    assert names == sorted(["the base model", "one", "two"] * 2)
    load = ("--load", f"extra={folder / 'three'}", "--api-key", KEY)
    first, *answers, last = example("lora_serving.py", "--url", server.url, *load)
    assert [line.partition(":")[0] for line in answers] == [
        BASE, *(f"{name} (adapter of {BASE})" for name in ("one", "two", "extra")),
    ]  # fmt: skip
    assert "added successfully" in first
    assert "removed successfully" in last


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """``example(name, word, ...)``: lines that an example prints."""

    def run(name: str, *words: str) -> list[str]:
        script = str(Path(__file__).parent.parent / "examples" / name)
        monkeypatch.setattr(sys, "argv", [script, *words])
        capsys.readouterr()
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_a_batch(folder: Path, tmp_path: Path, offline: dict[str, list[str]]) -> None:
    names = [BASE, "one", "two", "none"]
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions",
         "body": {"model": name, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}}
        for name in names
    ]  # fmt: skip
    source, result = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    modules = ("--lora-modules", f"one={folder / 'one'}", f"two={folder / 'two'}")
    words = ("run-batch", "-i", str(source), "-o", str(result), *modules, "--max-loras", "2")
    run_command(*words, "--dtype", "float32", "--enable-lora", "--enforce-eager").check_returncode()
    answers = [json.loads(line)["response"] for line in result.read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200, 200, 200, 404]
    texts = [answer["body"]["choices"][0]["text"] for answer in answers[:3]]
    assert texts == [offline[name][0] for name in names[:3]]


def test_embeddings(folder: Path) -> None:
    modules = ("--lora-modules", f"one={folder / 'one'}", f"two={folder / 'two'}")
    flags = ("--runner", "pooling", "--dtype", "float32", "--enable-lora", "--max-loras", "2")
    params: Any = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "runner": "pooling"}
    with LLM(demo_folder(), **params) as llm:
        adapters = [
            None,
            *(LoRARequest(n, i, str(folder / n)) for i, n in ((1, "one"), (2, "two"))),
        ]
        outputs = [llm.embed("a text", lora_request=adapter)[0] for adapter in adapters]
    expected = [output.outputs.embedding for output in outputs]
    with (
        serving(*flags, *modules) as running,
        openai.OpenAI(base_url=running.api, api_key="x", max_retries=0) as client,
    ):
        for name, vector in zip((BASE, "one", "two"), expected, strict=True):
            answer = client.embeddings.create(model=name, input="a text")
            assert answer.model == name
            assert answer.data[0].embedding == pytest.approx(vector, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-2)
    assert expected[1] != pytest.approx(expected[2], abs=1e-2)


def test_several_http_processes(folder: Path, offline: dict[str, list[str]]) -> None:
    """Each connection reaches one of the two."""
    with serving(
        *FLAGS, "--api-server-count", "2", "--lora-modules", f"one={folder / 'one'}"
    ) as running:

        def each(name: str) -> list[tuple[int, str, list[str]]]:
            """Status, text and list of eight connections."""
            return [_connected(running, name) for _ in range(8)]

        with openai.OpenAI(base_url=running.api, api_key=KEY, max_retries=0) as client:
            assert set(map(str, each("one"))) == {str((200, offline["one"][0], [BASE, "one"]))}
            change(client, "load", lora_name="extra", lora_path=str(folder / "two"))
            loaded = (200, offline["two"][0], [BASE, "one", "extra"])
            assert set(map(str, each("extra"))) == {str(loaded)}
            change(client, "unload", lora_name="extra")
            assert set(map(str, each("extra"))) == {str((404, "", [BASE, "one"]))}


def _connected(server: RunningServer, name: str) -> tuple[int, str, list[str]]:
    body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    with httpx2.Client(
        base_url=server.api, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    ) as http:
        answer = http.post("/completions", json=body)
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""
        return answer.status_code, text, [c["id"] for c in http.get("/models").json()["data"]]
