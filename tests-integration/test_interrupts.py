"""Ctrl-C while a model loads ends the command at once, also where loading itself cannot be interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from servers import PATIENCE, WatchedCommand, children_of

from headrace import demo
from headrace_testing.waiting import wait_until

STUCK = 600
"""Seconds that opening a weights file takes here, once its header was read: far more than the test waits."""
COMMANDS = {
    "serve": ["serve", "--port", "0"],
    "serve-engine-process": ["serve", "--port", "0", "--engine-process"],
    "serve-two-http-processes": ["serve", "--port", "0", "--api-server-count", "2"],
    "serve-several": ["serve", "--port", "0", "--models-config", "models.yaml"],
    "chat": ["chat"],
    "complete": ["complete", "-q", "Hello"],
    "generate": ["generate", "--prompt", "Hello"],
    "run-batch": ["run-batch", "-i", "requests.jsonl", "-o", "answers.jsonl"],
}


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize("name", COMMANDS)
def test_interrupted_while_it_reads_weights(name, tmp_path):
    (tmp_path / "models.yaml").write_text(
        yaml.safe_dump([{"name": "one", "model": str(demo.path()), "gpu_memory_utilization": 0.2}])
    )
    (tmp_path / "requests.jsonl").write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
        '"body": {"model": "headrace-demo", "messages": [{"role": "user", "content": "Hello"}]}}\n'
    )
    with _Command(COMMANDS[name], tmp_path) as command:
        command.wait_until_logged("failpoint loader.read: delay")
        children = children_of(command.process.pid)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(PATIENCE) == 130, command.text
    assert "Traceback" not in command.text
    assert "HR-" not in command.text
    for pid in children:
        wait_until(
            lambda pid=pid: not _runs_headrace(pid), what=f"child {pid} outlives the command"
        )


def test_a_library_that_swallows_the_exception_stops_nothing():
    """numpy and torch swallow it while they are imported."""
    code = (
        "import os, signal, threading\n"
        "from headrace.interrupts import ending_at_once\n"
        "with ending_at_once():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        threading.Event().wait(60)\n"
        "    except BaseException:\n"
        "        pass\n"
        f"    threading.Event().wait({STUCK})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 130


class _Command(WatchedCommand):
    """A ``headrace`` command whose weights never finish loading."""

    def __init__(self, words, folder: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=folder,
            env={
                **os.environ,
                "HEADRACE_LOGGING_LEVEL": "DEBUG",
                "HEADRACE_FAILPOINTS": f"loader.read=delay(seconds={STUCK},after=1)",
            },
        )  # fmt: skip
        super().__init__(process, process.stdout)

    def wait_until_logged(self, text: str) -> None:
        wait_until(lambda: text in self.text or self.process.poll() is not None, what=self.text)
        assert text in self.text, self.text


def _runs_headrace(pid: int) -> bool:
    """A process id may belong to another program by now."""
    try:
        return b"headrace" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
