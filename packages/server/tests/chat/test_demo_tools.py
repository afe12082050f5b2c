"""``--tool-server demo``: real child processes, around a stand-in for the ``gpt-oss`` package."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_core.errors import ConfigError, MissingDependency
from headrace_server.tools import demo, mcp
from headrace_server.tools.base import MAX_OUTPUT, Sessions
from headrace_server.tools.demo import LISTED, LISTED_FOR, check_demo
from headrace_server.tools.load import check_tool_server, load_tool_server
from headrace_server.tools.mcp import McpToolServer
from headrace_testing.fakes.engine import FakeEngine

pytest.importorskip("mcp.server.mcpserver", reason="mcp is absent, or older than 2")

HARMONY = """
class Role:
    ASSISTANT, TOOL = "assistant", "tool"
class TextContent:
    def __init__(self, text): self.text = text
class Message:
    def __init__(self, content): self.content, self.recipient, self.channel = content, None, None
    @classmethod
    def from_role_and_content(cls, role, text): return cls([TextContent(text)])
    def with_recipient(self, name): self.recipient = name; return self
    def with_channel(self, name): self.channel = name; return self
"""
"""The part of ``openai_harmony`` that tools use; written only where the real one is absent."""

BROWSER = """
import json, os
from types import SimpleNamespace as Some
from openai_harmony import Message, Role
print("noise on standard output")
class ExaBackend:
    def __init__(self, source): self.source = source
class SimpleBrowserTool:
    def __init__(self, backend): self.pages, self.backend = [], backend
    @property
    def tool_config(self):
        schema = {"type": "object", "properties": {"query": {"type": "string"}}}
        tools = [Some(name=n, description=n + "s", parameters=schema) for n in ("search", "open")]
        return Some(description="Browses the " + self.backend.source, tools=tools)
    async def process(self, message):
        assert message.channel == "analysis"
        self.pages.append(json.loads(message.content[0].text)["query"])
        told = [message.recipient, self.pages, sorted(os.environ)]
        yield Message.from_role_and_content(Role.TOOL, json.dumps(told))
"""

PYTHON = """
import os, pathlib, subprocess, sys
from types import SimpleNamespace as Some
from openai_harmony import Message, Role
class PythonTool:
    tool_config = Some(description="Runs code.", tools=[])
    async def process(self, message):
        assert message.recipient == "python"
        here = pathlib.Path(os.environ["TMPDIR"])
        if (here / "broken").exists():
            raise RuntimeError("no daemon at /secret/socket")
        print("noise on standard output")
        subprocess.run(["echo", "noise on descriptor 1"])
        try:  # as a container is removed
            script = message.content[0].text
            done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True)
        finally:
            (here / "cleaned").touch()
        yield Message.from_role_and_content(Role.TOOL, (done.stdout or done.stderr).decode())
"""


def install(folder: Path, version: str = "0.0.9") -> None:
    """Write the stand-in into a folder of the import path."""
    tools = folder / "gpt_oss" / "tools"
    (tools / "python_docker").mkdir(parents=True)
    for empty in (tools.parent, tools):
        (empty / "__init__.py").touch()
    (tools / "simple_browser.py").write_text(BROWSER)
    (tools / "python_docker" / "docker_tool.py").write_text(PYTHON)
    if importlib.util.find_spec("openai_harmony") is None:
        (folder / "openai_harmony.py").write_text(HARMONY)
    info = folder / f"gpt_oss-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gpt-oss\nVersion: {version}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The stand-in is installed; files of the tools are here."""
    folder = tmp_path_factory.mktemp("packages")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("TMPDIR", str(folder))
        for name in (*LISTED_FOR["browser"], *LISTED_FOR["python"]):
            patch.delenv(name, raising=False)
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path) -> McpToolServer:
    """Both tools, listed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXA_API_KEY", "key")
        patch.setenv("DOCKER_HOST", "unix:///nowhere")
        patch.setenv("HEADRACE_API_KEY", "canary")
        patch.setenv("HF_TOKEN", "canary")
        server = load_tool_server("demo")
        assert isinstance(server, McpToolServer)
        asyncio.run(server.prepare())
    return server


@pytest.fixture
def pids(folder: Path) -> Path:
    """Where hanging code writes whose process it is, and its parent's."""
    for name in ("pids", "cleaned"):
        (folder / name).unlink(missing_ok=True)
    return folder / "pids"


HANG = """
import os, pathlib, time
path = pathlib.Path(os.environ["TMPDIR"])
(path / "new").write_text(f"{os.getpid()} {os.getppid()}")
(path / "new").rename(path / "pids")
time.sleep(300)  # until it is killed
"""


def is_gone(pid: int) -> bool:
    """No such process, or a dead one whose parent has not asked for it yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def all_gone(file: Path) -> bool:
    return all(is_gone(int(pid)) for pid in file.read_text().split())


@contextlib.asynccontextmanager
async def opened(server: McpToolServer) -> Any:
    sessions = Sessions(server, "resp_1")
    try:
        yield sessions
    finally:
        await sessions.close()


async def test_both_tools_are_offered(server: McpToolServer) -> None:
    spaces = await server.namespaces()
    assert [(s.label, s.description) for s in spaces.values()] == [
        ("browser", "Browses the web"),
        ("python", "Runs code."),
    ]
    assert [t.name for t in spaces["browser"].tools] == ["search", "open"]
    (python,) = spaces["python"].tools
    assert python.name == "python"
    assert python.schema["required"] == ["code"]


@pytest.mark.req("SEC-24")
async def test_what_a_browser_is_given(server: McpToolServer) -> None:
    async with opened(server) as sessions:
        await sessions.call("browser", "search", '{"query": "a"}')
        recipient, pages, names = json.loads(
            (await sessions.call("browser", "open", '{"query": "b"}')).text
        )
        wrong = await sessions.call("browser", "open", '{"id": "b"}')
        unknown = await sessions.call("browser", "close", "{}")
    assert (recipient, pages) == ("browser.open", ["a", "b"])  # one process, its state kept
    assert set(names) <= {*LISTED, *LISTED_FOR["browser"], "LOGNAME", "SHELL", "TERM", "USER",
                          "LC_CTYPE"}  # fmt: skip
    assert "EXA_API_KEY" in names
    assert wrong == ("error: the browser tool failed (KeyError)", True)
    assert unknown.failed


@pytest.mark.req("SEC-24")
async def test_what_python_is_given(server: McpToolServer) -> None:
    code = """
import os
parent = f"/proc/{os.getppid()}"
print(open(parent + "/environ").read().replace(chr(0), "\\n"))
for fd in os.listdir(parent + "/fd"):
    print("FD", os.readlink(f"{parent}/fd/{fd}"))
"""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        os.set_inheritable(listening.fileno(), True)
        inode = os.fstat(listening.fileno()).st_ino
        async with opened(server) as sessions:
            told = (await sessions.call("python", "python", code)).text
            flood = await sessions.call("python", "python", f"print('x' * {2 * MAX_OUTPUT})")
            failed = await sessions.call("python", "python", "1/0")
    names = set(re.findall(r"^(\w+)=", told, re.M))
    assert names <= {*LISTED, *LISTED_FOR["python"], "LOGNAME", "SHELL", "TERM", "USER"}
    assert {"PATH", "DOCKER_HOST"} <= names
    assert "EXA_API_KEY" not in names
    assert "canary" not in told
    assert "FD pipe:" in told
    assert f"socket:[{inode}]" not in told
    assert len(flood.text) <= MAX_OUTPUT
    assert "shown]" in flood.text
    assert "ZeroDivisionError" in failed.text


@pytest.mark.req("REL-05", "SEC-24")
async def test_leaving_ends_what_runs(server: McpToolServer, pids: Path, until: Any) -> None:
    async with opened(server) as sessions:
        call = asyncio.create_task(sessions.call("python", "python", HANG))
        await until(pids.exists)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await until(lambda: all_gone(pids))
    assert (pids.parent / "cleaned").exists()


async def test_the_next_call_has_another_process(
    server: McpToolServer, pids: Path, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a call that takes too long, and one whose process dies."""
    async with opened(server) as sessions:
        assert (await sessions.call("python", "python", "print(1)")).text == "1\n"
        monkeypatch.setattr(mcp, "CALL_SECONDS", 5.0)
        late = await sessions.call("python", "python", HANG)
        assert late == ("error: the tool took longer than 5 s", True)
        monkeypatch.undo()
        await until(lambda: all_gone(pids))
        assert (pids.parent / "cleaned").exists()
        pids.unlink()
        call = asyncio.create_task(sessions.call("python", "python", HANG))
        await until(pids.exists)
        os.kill(int(pids.read_text().split()[1]), signal.SIGKILL)
        assert await call == ("error: the tool could not be called", True)
        await until(lambda: all_gone(pids))
        assert (await sessions.call("python", "python", "print(2)")).text == "2\n"


@pytest.mark.req("SEC-24")
async def test_nothing_outlives_a_server_that_is_killed(pids: Path, until: Any) -> None:
    code = f"""
import asyncio
from headrace_server.tools.base import Sessions
from headrace_server.tools.load import load_tool_server

async def main():
    server = load_tool_server("demo")
    await server.prepare()
    await Sessions(server, "1").call("python", "python", {HANG!r})

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        await until(pids.exists)
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: all_gone(pids))
    assert (pids.parent / "cleaned").exists()


async def test_processes_are_bounded(
    folder: Path,
    until: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "MAX_CHILDREN", 1)
    with caplog.at_level(logging.WARNING):
        server = load_tool_server("demo")
        assert isinstance(server, McpToolServer)
        async with opened(server) as first, opened(server) as second:
            await server.namespaces()
            assert (await first.call("python", "python", "print(1)")).text == "1\n"
            waiting = asyncio.create_task(second.call("python", "python", "print(2)"))
            await until(lambda: "waits for one to end" in caplog.text)
            assert not waiting.done()
            await first.close()
            assert (await waiting).text == "2\n"
    assert "browser is left out: set EXA_API_KEY" in caplog.text


async def test_what_does_not_work_is_left_out(
    folder: Path,
    connect: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "broken").touch()
    monkeypatch.setenv("BROWSER_BACKEND", "youcom")  # the stand-in has no such service
    monkeypatch.setenv("YDC_API_KEY", "key")
    try:
        client = connect(
            FakeEngine(), tool_server="demo", enable_auto_tool_choice=True,
            tool_call_parser="hermes",
        )  # fmt: skip
        body = {"input": "Hi", "tools": [{"type": "code_interpreter"}]}
        answer = await client.post("/v1/responses", json=body)
    finally:
        (folder / "broken").unlink()
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "'python' is not known; known: none" in message
    assert "demo browser is left out: AttributeError" in caplog.text
    assert "demo python is left out: print(6 * 7) did not answer 42 but 'RuntimeError: no d" in (
        caplog.text
    )
    assert "docker pull python:3.11" in caplog.text


WRITE = '<tool_call>{"name": "python", "arguments": %s}</tool_call>'


def call_python(code: str) -> str:
    return WRITE % json.dumps({"code": code})


@pytest.mark.req("REL-05")
async def test_a_response_runs_code(
    folder: Path, live: Any, pids: Path, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    caplog.set_level(logging.INFO)
    replies = [call_python("print(6 * 7)"), "It is 42.", call_python(HANG)]
    engine = FakeEngine(lambda text, index: replies.pop(0))
    server = await live(
        engine, tool_server="demo", enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    await until(lambda: "tools of this server's own: python" in caplog.text, 30)
    body = {"input": "Hi", "tools": [{"type": "code_interpreter"}]}
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        answer = await client.post("/v1/responses", json=body)
        left = asyncio.create_task(client.post("/v1/responses", json=body))
        await until(pids.exists)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
    assert answer.status_code == 200, answer.text
    call, message = answer.json()["output"]
    assert (call["type"], call["status"]) == ("code_interpreter_call", "completed")
    assert message["content"][0]["text"] == "It is 42."
    told = [m["content"] for m in engine.requests[1].prompt.messages if m["role"] == "tool"]  # type: ignore[union-attr]
    assert told == ["42\n"]
    await until(lambda: all_gone(pids))
    await until(lambda: server.state.lifecycle.num_in_flight == 0)
    assert len(engine.requests) == 3


def test_packages_that_are_absent_or_old(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "0.0.6")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependency, match=r"too old \(0.0.6\).*gpt-oss>=0.0.7") as caught:
        check_tool_server("demo")
    assert ("needs Python 3.12" in str(caught.value)) == (sys.version_info < (3, 12))
    monkeypatch.undo()
    check_tool_server(" demo ")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "mcp" else find(n))
    with pytest.raises(MissingDependency, match=r"headrace-server\[tools\]"):
        check_tool_server("demo")


def test_a_setting_is_checked_without_starting_anything() -> None:
    check_tool_server(None)
    check_tool_server("127.0.0.1:1")
    with pytest.raises(ConfigError, match="host:port"):
        check_tool_server("nowhere")


@pytest.mark.parametrize("name", ["PYTHON_EXECUTION_BACKEND", "BROWSER_BACKEND"])
def test_words_that_the_package_does_not_know(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 'podman' must be one of"):
        check_demo({name: "podman"})


def test_code_outside_a_container_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    demo.demo_sources({"PYTHON_EXECUTION_BACKEND": "dangerously_use_uv"})
    assert "outside a container" in caplog.text
    caplog.clear()
    demo.demo_sources({"PYTHON_EXECUTION_BACKEND": "docker"})
    assert "outside a container" not in caplog.text


def test_hardened_runs_code_in_containers_only(folder: Path) -> None:
    check_demo({"PYTHON_EXECUTION_BACKEND": "docker"}, hardened=True)
    with pytest.raises(ConfigError, match=r"must be one of docker$"):
        check_demo({"PYTHON_EXECUTION_BACKEND": "dangerously_use_uv"}, hardened=True)
