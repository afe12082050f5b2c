"""Batch files: lines, journal, runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.batch.inprocess import InProcess, InProcessResponse
from headrace.batch.journal import Journal, journal_beside
from headrace.batch.lines import BatchInput, encode, output_of, read_line, requests, scan
from headrace.batch.runner import Runner
from headrace.cli.run_batch import journal_path, make_parser
from headrace_core.errors import ConfigError, EngineDead, RequestError
from headrace_server import ServerSettings, create_app
from headrace_server.routes.availability import INFERENCE_ROUTES
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model
from headrace_testing.waiting import until

CHAT = "/v1/chat/completions"
SOURCE = BatchInput(3, "digest")


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = body or {"messages": [{"role": "user", "content": f"question {number}"}]}
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def client(engine: FakeEngine, **options: Any) -> InProcess:
    return InProcess(create_app(engine, ServerSettings(enable_request_id_headers=True, **options)))


async def run(source: Path, journal: Journal, engine: FakeEngine, **options: Any) -> Any:
    def check() -> None:
        if engine.dead_error is not None:
            raise EngineDead("dead")

    runner = Runner(
        options.pop("client", None) or client(engine),
        journal,
        paths=options.pop("paths", {CHAT, "/v1/completions", "/v1/embeddings"}),
        repeated=options.pop("repeated", None),
        concurrency=options.pop("concurrency", 3),
        check=check,
    )
    return await runner.run(requests(source))


def outputs(journal: Journal, path: Path) -> list[Any]:
    journal.write_output(path)
    return [json.loads(one) for one in path.read_text().splitlines()]


async def test_every_line_has_an_answer_in_order(tmp_path: Path) -> None:
    lines = [line(i) for i in range(10)]
    lines[3] = line(3, "/v1/nothing")
    lines[5] = line(5, messages=[])
    lines[6] = line(6, "/v1/embeddings", input="x")
    lines[7] = line(7, "/v1/completions", prompt="a", max_tokens=2)
    lines[8]["method"] = "GET"
    lines[9] = line(9, messages=[{"role": "user", "content": "x"}], stream=True)
    source = write(tmp_path / "in", lines)
    source.write_text("\n" + source.read_text() + "\n \n")
    found = scan(source)
    assert found.num_lines == 10
    with Journal(tmp_path / "j", found, "m") as journal:
        counts = await run(source, journal, FakeEngine("Hello."))
        answers = outputs(journal, tmp_path / "out")
    assert (counts.submitted, counts.completed, counts.failed) == (10, 10, 5)
    assert [a["custom_id"] for a in answers] == [f"id-{i}" for i in range(10)]
    assert len({a["id"] for a in answers}) == 10
    good = answers[0]
    assert good["error"] is None
    assert good["response"]["status_code"] == 200
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "Hello."
    assert good["response"]["body"]["id"] == "chatcmpl-" + good["response"]["request_id"]
    assert answers[7]["response"]["body"]["choices"][0]["text"] == "He"
    for number, said in ((3, "/v1/nothing"), (5, "messages"), (6, "Embeddings"), (8, "method"),
                         (9, "stream")):  # fmt: skip
        assert answers[number]["response"]["status_code"] == 400
        assert answers[number]["response"]["body"] is None
        assert said in answers[number]["error"]["message"]
    assert answers[5]["error"]["param"] == "messages"


async def test_a_custom_id_that_another_line_has_is_refused(tmp_path: Path) -> None:
    """By the line's number, with OpenAI's code; the other lines run, the first of equals too."""
    lines = [line(i) for i in range(5)]
    lines[2]["custom_id"] = lines[4]["custom_id"] = "id-1"
    source = write(tmp_path / "in", lines)
    source.write_text("\n" + source.read_text())  # a blank line counts as a line
    found = scan(source)
    assert (found.num_lines, dict(found.repeated)) == (5, {4: 3, 6: 3})
    for resumed in (False, True):
        engine = FakeEngine("Hello.")
        with Journal(tmp_path / "j", found, "m") as journal:
            assert journal.num_resumed == (5 if resumed else 0)
            counts = await run(source, journal, engine, repeated=found.repeated)
            answers = outputs(journal, tmp_path / "out")
        assert counts.completed == (0 if resumed else 5)
        assert [a["error"] is None for a in answers] == [True, True, False, True, False]
        assert [a["custom_id"] for a in answers] == ["id-0", "id-1", "id-1", "id-3", "id-1"]
        for number, answer in ((4, answers[2]), (6, answers[4])):
            assert answer["response"]["status_code"] == 400
            error = answer["error"]
            assert (error["code"], error["param"]) == ("duplicate_custom_id", "custom_id")
            assert error["message"] == (
                f"line {number}: custom_id = 'id-1': must differ from that of line 3"
            )


HI = [{"role": "user", "content": "x"}]
REFUSED_LINES = [
    ({"method": "GET"}, "method"),
    ({"url": "/v1/nothing"}, "url"),
    ({"url": ""}, "url"),
    ({"custom_id": "first"}, "custom_id"),
    ({"body": {"messages": HI, "stream": True}}, "stream"),
    ({"body": {"messages": HI, "stream": 3}}, "stream"),
    ({"body": {"messages": HI, "encoding_format": "bytes"}}, "encoding_format"),
    ({"body": {"messages": HI, "encoding_format": "bytes_only"}}, "encoding_format"),
    ({"body": {"messages": HI, "temperature": -1}}, "temperature"),
    ({"body": {"messages": HI, "n": 1000}}, "n"),
    ({"body": {"messages": HI, "model": "other"}}, "model"),
    ({"body": {"messages": "x"}}, "messages"),
    ({"body": {}}, "messages"),
    ({"url": "/v1/completions", "body": {"prompt": "x", "logprobs": -3}}, "logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "field"), REFUSED_LINES)
async def test_a_refused_line_names_its_field(
    tmp_path: Path, wrong: dict[str, Any], field: str
) -> None:
    first = {**line(0), "custom_id": "first"}
    source = write(tmp_path / "in", [first, {**line(1, messages=HI), **wrong}])
    found = scan(source)
    with Journal(tmp_path / "j", found, "m") as journal:
        await run(source, journal, FakeEngine("Hello."), repeated=found.repeated)
        good, refused = outputs(journal, tmp_path / "out")
    assert good["error"] is None
    assert refused["response"]["status_code"] in (400, 404)
    assert refused["error"]["param"] == field
    assert field in refused["error"]["message"]


async def test_a_byte_order_mark_begins_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(0), line(1)])
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    with Journal(tmp_path / "j", scan(source), "m") as journal:
        await run(source, journal, FakeEngine("Hello."))
        answers = outputs(journal, tmp_path / "out")
    assert [a["error"] for a in answers] == [None, None]
    source.write_bytes(source.read_bytes() + b"\xef\xbb\xbf{}\n")
    with pytest.raises(RequestError, match="line 3"):
        scan(source)


@pytest.mark.parametrize("depth", [1500, 600])
async def test_a_line_that_is_nested_too_deeply(tmp_path: Path, depth: int) -> None:
    """The file is refused for a line that cannot be decoded; a body that is too deep is refused alone."""
    deep = "[" * depth + "]" * depth
    text = json.dumps(line(0)).replace('"body": {', f'"body": {{"x": {deep}, ')
    source = write(tmp_path / "in", [line(1)])
    source.write_text(source.read_text() + text + "\n")
    if depth > 1000:
        said = "line 2: is nested 1502 levels deep; a body may have at most 512 levels"
        with pytest.raises(RequestError, match=said):
            scan(source)
        return
    with Journal(tmp_path / "j", scan(source), "m") as journal:
        await run(source, journal, FakeEngine("Hello."))
        answers = outputs(journal, tmp_path / "out")
    assert answers[0]["error"] is None
    assert answers[1]["error"]["message"].startswith("the body is nested 601 levels deep")


POOLED = [
    ("/v1/embeddings", {"input": ["a", "b"]}, "embd-"),
    ("/v1/embeddings", {"input": [1, 2], "encoding_format": "base64"}, "embd-"),
    ("/score", {"text_1": "a", "text_2": ["a", "b"]}, "score-"),
    ("/v1/score", {"queries": "a", "documents": "b"}, "score-"),
    ("/rerank", {"query": "a", "documents": ["b", "a"]}, "rerank-"),
    ("/v1/rerank", {"query": "a", "documents": ["b", "a"]}, "rerank-"),
    ("/v2/rerank", {"query": "a", "documents": ["b", "a"], "top_n": 1}, "rerank-"),
    ("/pooling", {"input": "a"}, "pool-"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "JSON only"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}]}, "Chat Completions API"),
]


async def test_lines_that_pool(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(i, url, **b) for i, (url, b, _) in enumerate(POOLED)])
    engine = FakeEngine(model=fake_pooling_model("embed", "token_embed", scoring="cosine"))
    with Journal(tmp_path / "j", scan(source), "m") as journal:
        counts = await run(source, journal, engine, paths=INFERENCE_ROUTES)
        answers = outputs(journal, tmp_path / "out")
    assert (counts.completed, counts.failed) == (len(POOLED), 2)
    for answer, (_, _, said) in zip(answers, POOLED, strict=True):
        if answer["error"] is None:
            assert answer["response"]["body"]["id"].startswith(said)
        else:
            assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 2"), ("[]", "line 2: a request: must be an object, not a list"),
        ('{"custom_id": 1}', "line 2: custom_id: must be text, not a number"),
        ('{"custom_id": "a", "method": "POST", "url": "x"}', "body"), ("\\xff", "line 2"),
        ("nonsense", "line 2"),
        ('{"custom_id": "", "method": "POST", "url": "x", "body": {}}',
         "line 2: custom_id = '': must have at least one character"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_stops_everything(tmp_path: Path, text: str, said: str) -> None:
    source = tmp_path / "in"
    source.write_text(json.dumps(line(0)) + "\n" + text + "\n")
    with pytest.raises(RequestError, match=said):
        scan(source)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(RequestError, match="no requests"):
        scan(tmp_path / "empty")
    with pytest.raises(RequestError, match="could not be read"):
        scan(tmp_path / "absent")


BODIES = [
    {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "x"}], "n": 1000},
    {"messages": [{"role": "user", "content": "x"}], "guided_choice": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": "x"}], "model": "other"},
    {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
    {"messages": "x"},
    {"messages": [{"role": "user", "content": "x" * 5000}]},
    {"messages": [{"role": "user", "content": "x"}], "unheard": "of"},
    {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
    ["no", "object"],
    None,
]


@pytest.mark.req("SEC-11")
@pytest.mark.parametrize("strict", [False, True])
async def test_bodies_get_the_verdicts_of_the_http_route(tmp_path: Path, strict: bool) -> None:
    import httpx2

    app = create_app(FakeEngine("x"), ServerSettings(strict_requests=strict))
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as http:
        json_type = {"content-type": "application/json"}
        verdicts = [
            await http.post(CHAT, content=json.dumps(body), headers=json_type) for body in BODIES
        ]
    source = write(tmp_path / "in", [{**line(i), "body": b} for i, b in enumerate(BODIES)])
    with Journal(tmp_path / "j", scan(source), "m") as journal:
        await run(
            source, journal, FakeEngine(), client=client(FakeEngine("x"), strict_requests=strict)
        )
        answers = outputs(journal, tmp_path / "out")
    for verdict, answer in zip(verdicts, answers, strict=True):
        assert answer["response"]["status_code"] == verdict.status_code
        assert answer["error"] == verdict.json().get("error")


async def test_no_more_at_once_than_allowed(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(i) for i in range(12)])
    gate = asyncio.Event()
    engine = FakeEngine("x", gate=gate)
    with Journal(tmp_path / "j", scan(source), "m") as journal:
        running = asyncio.create_task(run(source, journal, engine, concurrency=4))
        await until(lambda: len(engine.requests) == 4)
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.num_running == len(engine.requests) == 4, "a fifth came"
        assert len(journal) == 0
        gate.set()
        await running
        assert len(journal) == 12


async def test_a_busy_server_is_waited_for(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(i) for i in range(6)])
    engine = FakeEngine("x", max_running=2, delay=0.001)
    with Journal(tmp_path / "j", scan(source), "m") as journal:
        await run(source, journal, engine, concurrency=3, client=_Impatient(client(engine)))
        assert all(a["error"] is None for a in outputs(journal, tmp_path / "out"))


class _Impatient:
    """Makes waiting short."""

    def __init__(self, inner: InProcess) -> None:
        self._inner = inner

    async def post(self, path: str, body: bytes) -> InProcessResponse:
        answer = await self._inner.post(path, body)
        return answer._replace(headers={**answer.headers, "retry-after": "0"})


async def test_a_dead_engine_stops_the_batch_and_nothing_is_lost(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(i) for i in range(9)])
    found = scan(source)
    dying = FakeEngine("abc", die_after=4)
    with Journal(tmp_path / "j", found, "m") as journal, pytest.raises(EngineDead):
        await run(source, journal, dying, concurrency=1)
    engine = FakeEngine("abc")
    with Journal(tmp_path / "j", found, "m") as journal:
        resumed = journal.num_resumed
        assert 0 < resumed < 9
        await run(source, journal, engine)
        answers = outputs(journal, tmp_path / "out")
    assert len(engine.requests) == 9 - resumed
    assert [a["custom_id"] for a in answers] == [f"id-{i}" for i in range(9)]
    assert all(a["error"] is None for a in answers)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.data())
def test_a_journal_survives_a_crash_at_any_byte(
    tmp_path_factory: pytest.TempPathFactory, count: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    made = read_line(1, json.dumps(line(0)).encode())
    ends = []
    with Journal(path, SOURCE, "m") as journal:
        ends.append(path.stat().st_size)
        for number in range(count):
            journal.add(number, encode(output_of(made, 200, "", f'"größe {number}"'.encode())))
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    survivors = sum(end <= cut for end in ends) - (cut >= ends[0])
    with Journal(path, SOURCE, "m") as journal:
        assert [number in journal for number in range(4)] == [n < survivors for n in range(4)]
        for number in range(survivors, 4):
            journal.add(number, encode(output_of(made, 200, "", b"{}")))
        answers = outputs(journal, path.with_name("out"))
    assert len(answers) == 4


def test_journals_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with answered(path):
        pass
    for source, model, said in ((SOURCE, "n", "model"), (BatchInput(3, "x"), "m", "input")):
        with pytest.raises(ConfigError, match=said):
            Journal(path, source, model)
    for text in ("hello\n", "hello"):
        (tmp_path / "text").write_text(text)
        with pytest.raises(ConfigError, match="not a journal"):
            Journal(tmp_path / "text", SOURCE, "m")
        assert (tmp_path / "text").read_text() == text
    with pytest.raises(ConfigError, match="written"):
        Journal(tmp_path / "absent" / "j", SOURCE, "m")
    with Journal(path, SOURCE, "m"), pytest.raises(ConfigError, match="in use"):
        Journal(path, SOURCE, "m")
    with pytest.raises(ConfigError, match="other options"):
        Journal(path, SOURCE, "m", "temperature 0")


def test_where_answers_are_kept(tmp_path: Path) -> None:
    def parse(*words: str) -> Any:
        return make_parser().parse_args(["-i", "x", *words])

    assert journal_path(parse("-o", f"{tmp_path}/out"), tmp_path) == tmp_path / "out.partial"
    args = parse("-o", "http://h/o?key=1", "--output-tmp-dir", f"{tmp_path}/kept")
    again = parse("-o", "http://h/o?key=2", "--output-tmp-dir", f"{tmp_path}/kept")
    assert journal_path(args, tmp_path) == journal_path(again, tmp_path)
    assert journal_path(args, tmp_path).parent == tmp_path / "kept"
    assert journal_path(parse("-o", "http://h/o"), tmp_path) == tmp_path / "journal"
    with pytest.raises(ConfigError, match="folder"):
        journal_path(parse("-o", f"{tmp_path}/absent/out"), tmp_path)


def test_required_flags() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "run-batch", "-i", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--output-file" in done.stderr


def answered(path: Path) -> Journal:
    journal = Journal(path, SOURCE, "m")
    answer = output_of(read_line(1, json.dumps(line(1)).encode()), 200, "r", b"{}")
    journal.add(1, encode(answer))
    return journal


def test_a_batch_without_an_answer_leaves_no_journal(tmp_path: Path) -> None:
    """Its model could not be loaded, say; or it was killed before its first answer."""
    path = tmp_path / "j"
    with pytest.raises(KeyError), Journal(path, SOURCE, "mistyped"):
        raise KeyError
    assert not path.exists()
    Journal(path, SOURCE, "killed")._file.close()
    with Journal(path, SOURCE, "m") as journal:
        assert len(journal) == 0
        journal.add(1, b"{}")
    with pytest.raises(ConfigError, match="another model"):
        Journal(path, SOURCE, "killed")


def test_a_link_stays_and_its_target_gets_the_answers(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "answers", tmp_path / "out"
    target.write_text("old")
    link.symlink_to(target)
    with answered(tmp_path / "journal") as journal:
        journal.write_output(link)
    assert link.is_symlink()
    assert json.loads(target.read_text())["custom_id"] == "id-1"
    args = make_parser().parse_args(["-i", "in", "-o", str(link)])
    assert journal_path(args, tmp_path) == target.with_name("answers.partial")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """The pipe stands for a device, which a test must not risk."""
    pipe = tmp_path / "out"
    os.mkfifo(pipe)
    args = make_parser().parse_args(["-i", "in", "-o", str(pipe)])
    assert journal_path(args, tmp_path / "scratch") == tmp_path / "scratch" / "journal"
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with answered(tmp_path / "journal") as journal:
            journal.write_output(pipe)
        assert json.loads(os.read(reading, 1 << 16))["custom_id"] == "id-1"
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["journal", "out"]


def test_a_pipe_under_another_name_is_written_to(tmp_path: Path) -> None:
    """The output is a link to a name that does not exist, as /dev/stdout in ``headrace ... | program``."""
    reading, writing = os.pipe()
    try:
        named = Path(f"/proc/self/fd/{writing}")
        assert journal_beside(str(named), tmp_path) == tmp_path / "journal"
        with answered(tmp_path / "journal") as journal:
            journal.write_output(named)
        assert json.loads(os.read(reading, 1 << 16))["custom_id"] == "id-1"
    finally:
        os.close(reading)
        os.close(writing)


def test_an_output_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    args = make_parser().parse_args(["-i", "in", "-o", str(tmp_path)])
    with pytest.raises(ConfigError, match="is a folder"):
        journal_path(args, tmp_path)


def test_an_output_that_is_the_input_is_refused(tmp_path: Path) -> None:
    """Whatever it is called: the requests would be lost."""
    source, link, loop = tmp_path / "in", tmp_path / "link", tmp_path / "loop"
    source.write_text("{}")
    link.symlink_to(source)
    loop.symlink_to(loop)
    for output in (source, link):
        args = make_parser().parse_args(["-i", str(source), "-o", str(output)])
        with pytest.raises(ConfigError, match="is the input file"):
            journal_path(args, tmp_path)
    with pytest.raises(ConfigError, match="leads nowhere"):
        journal_path(make_parser().parse_args(["-i", "in", "-o", str(loop)]), tmp_path)
