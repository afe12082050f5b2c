"""A second host, which is a network namespace of this machine, with process ids of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from servers import PATIENCE, children_of

_numbers = itertools.count()


class Host:
    """Its namespace, and the network between it and this machine's own.

    Args:
        number: makes names and addresses that no other test has.
    """

    def __init__(self, number: int) -> None:
        self.name = f"headrace{number}"
        self.here, self.there = f"hr{number}a", f"hr{number}b"
        network = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.address, self.other_address = f"{network}.1", f"{network}.2"

    def make(self) -> None:
        """Make it. Raises CalledProcessError where that is not permitted."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self.here, "type", "veth", "peer", "name", self.there)
        _ip("link", "set", self.there, "netns", self.name)
        _ip("addr", "add", f"{self.address}/24", "dev", self.here)
        _ip("link", "set", self.here, "up")
        _ip("-n", self.name, "addr", "add", f"{self.other_address}/24", "dev", self.there)
        _ip("-n", self.name, "link", "set", self.there, "up")
        _ip("-n", self.name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Nothing passes between the hosts any more, and nobody is told."""
        _ip("link", "set", self.here, "down")

    def remove(self) -> None:
        for words in (("link", "del", self.here), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], check=False, capture_output=True)

    def start(self, *words: str, environment: dict[str, str] | None = None) -> HostProcess:
        """Start ``headrace WORDS`` there."""
        command = [
            "ip", "netns", "exec", self.name, "unshare", "--pid", "--fork", "--kill-child",
            sys.executable, "-m", "headrace", *words,
        ]  # fmt: skip
        return HostProcess(command, environment)


class HostProcess:
    """A command there; ``log`` is what it has written so far."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of headrace's process, as this host sees it."""
        [pid] = children_of(self._process.pid)
        return pid

    @property
    def ranks(self) -> list[int]:
        """Processes of its ranks, as this host sees them."""
        return children_of(self.pid)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit status."""
        status = self._process.wait(seconds)
        self._reader.join(PATIENCE)
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log += line


def refusal() -> str | None:
    """Why there can be no second host here; None: there can."""
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("unshare"):
        return "needs Linux with ip and unshare"
    try:
        with second_host():
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


@contextmanager
def second_host() -> Iterator[Host]:
    """A host, gone at the end."""
    host = Host((os.getpid() * 8 + next(_numbers)) % 12000)
    try:
        host.make()
        yield host
    finally:
        host.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
