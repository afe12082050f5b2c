"""``headrace chat`` as a person sees it: in a terminal, with keys; and ``complete``."""

from __future__ import annotations

import json
import re
import stat
import subprocess

import pytest
from forks import run_command
from servers import PATIENCE, serving, slow_steps
from terminal import CTRL_C, CTRL_D, CTRL_P, Terminal

LONG = "Hello, hello, hello, hello, hello, hello, hello, hello!"


@pytest.fixture(scope="module")
def server():
    with serving("--max-model-len", "128") as running:
        yield running


@pytest.fixture(scope="module", params=["local", "remote"])
def chat(request, tmp_path_factory):
    """One chat for all tests of this module, in their order."""
    state = tmp_path_factory.mktemp("state")
    words = ["chat", "--temperature", "0", "--max-tokens", "24"]
    if request.param == "remote":
        words += ["--url", request.getfixturevalue("server").api]
    else:
        words += ["--max-model-len", "128"]
    with Terminal(*words, XDG_STATE_HOME=str(state)) as terminal:
        terminal.state, terminal.is_local = state, request.param == "local"
        yield terminal


def test_it_begins_with_the_model_and_the_keys(chat):
    shown = chat.shows("> ")
    assert "headrace-demo" in shown
    assert "context 128 tokens" in shown
    assert ("in this process" if chat.is_local else "served at http://127.0.0.1") in shown
    for word in ("/help", "Ctrl-C", "Ctrl-D"):
        assert word in shown


def test_it_answers_and_knows_what_was_said(chat, tmp_path):
    chat.press("What is 2 + 3?\n")
    chat.shows("5")
    chat.shows("> ")
    file = tmp_path / "saved.json"
    chat.press(f"/save {file}\n")
    chat.shows("saved to")
    chat.shows("> ")
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["user", "assistant"]
    chat.press(f"/save {file}\n")
    chat.shows("was not written: File exists")
    chat.shows("> ")


def test_commands(chat, tmp_path):
    chat.press("/help\n")
    listed = chat.shows("> ")
    for word in ("/clear", "/system TEXT", "/save FILE", "/quit"):
        assert word in listed
    chat.press("/sytem x\n")
    refused = chat.shows("> ")
    assert "did you mean /system" in refused
    assert "/clear" in refused
    chat.press("/clear\n")
    chat.shows("> ")
    chat.press("/system Be brief.\n")
    chat.shows("> ")
    chat.press(f"/save {tmp_path / 'system'}\n")
    chat.shows("> ")
    saved = json.loads((tmp_path / "system").read_text())["messages"]
    assert saved == [{"role": "system", "content": "Be brief."}]
    chat.press("/system\n")
    chat.shows("> ")


def test_lines_are_kept_for_their_user_alone(chat):
    chat.press("/clear\n")
    chat.shows("the conversation begins anew")
    chat.shows("> ")
    chat.press(f"{CTRL_P}\n")  # the line before, once more
    chat.shows("the conversation begins anew")
    chat.shows("> ")
    (file,) = chat.state.rglob("chat-history")
    assert "What is 2 + 3?" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_full_context_drops_the_oldest_turns(chat):
    chat.press("/clear\n")
    chat.shows("> ")
    for _ in range(6):
        chat.press(f"{LONG}\n")
        if "oldest" in chat.shows("> "):
            break
    else:
        pytest.fail("six long questions were all kept in 128 tokens")
    chat.press("Hello " * 200 + "\n")
    assert "128 tokens" in chat.shows("> ")  # too long by itself: said, and the chat goes on
    chat.press("/clear\n")
    chat.shows("> ")
    chat.press("What is 2 + 3?\n")
    chat.shows("5")
    chat.shows("> ")


def test_the_end_of_input_ends_it(chat):
    chat.press(CTRL_D)
    assert chat.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("where", ["local", "remote"])
def test_ctrl_c_stops_the_answer_and_twice_the_chat(where, tmp_path):
    """Slow steps: the answer still runs when it is stopped."""
    slow = {**slow_steps(0.5), "HEADRACE_LOGGING_LEVEL": "ERROR"}
    words = ["chat", "--temperature", "0", "--max-model-len", "128"]
    with _slow_server(where, slow_steps(0.5)) as url:
        if url:
            words = [*words[:3], "--url", url]
            slow = {}
        with Terminal(*words, XDG_STATE_HOME=str(tmp_path), **slow) as chat:
            chat.shows("> ")
            chat.press("Hello\n")
            chat.shows("Hello!")
            chat.press(CTRL_C)
            chat.shows("[stopped; Ctrl-C again")
            chat.shows("> ")
            chat.press("/clear\n")
            chat.shows("> ")
            chat.waits()
            chat.press(CTRL_C)
            chat.shows("> ")
            chat.waits()
            chat.press(CTRL_C)
            assert chat.process.wait(PATIENCE) == 0


def _slow_server(where, slow):
    import contextlib

    @contextlib.contextmanager
    def started():
        if where == "local":
            yield None
            return
        with serving("--max-model-len", "128", environment=slow) as running:
            yield running.api

    return started()


def test_complete_with_the_demo_model_says_something_sensible(server):
    for words in ([], ["--url", server.api]):
        done = _run("complete", "-q", "What is 2 + 3?", "--temperature", "0", *words)
        assert done.stdout.strip() == "2 + 3 = 5.", done
        assert "demo model" in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [("localhost:8000", "http://localhost:8000/v1"), ("{root}/v2", "404"), ("{root}/docs", "/v1")],
)
def test_a_wrong_url_is_no_bug(server, url, said):
    done = _run("chat", "-q", "Hello", "--url", url.format(root=server.url))
    assert done.returncode == 2
    assert said in done.stderr
    assert "HR-BUG" not in done.stderr
    assert not re.search("Traceback", done.stderr)


def _run(*words: str) -> subprocess.CompletedProcess:
    return run_command(*words, timeout=PATIENCE)
