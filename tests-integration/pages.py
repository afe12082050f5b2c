"""Blocks of Markdown pages, and a shell that runs their commands one after the other."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

CONSOLE = "console"
SHELLS = frozenset({"bash", "sh", "shell", "zsh", "shell-session"})
_BLOCK = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT = 120.0
"""Seconds that a command may take; it only ends a hang."""


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block of a page, in order."""
    return _BLOCK.findall(page)


def commands(language: str, text: str) -> list[str]:
    """Commands of a block: lines with a prompt in a console block, all lines in a script; none in others.

    A line that ends with a backslash goes on in the next one.
    """
    if language != CONSOLE and language not in SHELLS:
        assert not re.search(r"^\$ ", text, re.MULTILINE), (
            f"a console block is marked as {language!r}"
        )
        return []
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    if language == CONSOLE:
        found = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    else:
        found = [line for line in lines if line.strip() and not line.startswith("#")]
    assert found, f"a {language} block without a command:\n{text}"
    return found


class Shell:
    """Runs commands in a folder; what one exports or activates, the next ones have."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = dict(environment)

    def run(self, command: str, stdin: str = "") -> str:
        """The command's standard output.

        Raises:
            AssertionError: its status is not 0.
        """
        kept = self.folder / ".environment"
        done = subprocess.run(
            ["bash", "-c", f'{command}\nstatus=$?\nenv -0 > "{kept}"\nexit $status'],
            cwd=self.folder, env=self.environment, input=stdin, capture_output=True, text=True,
            timeout=LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        pairs = kept.read_text().split("\0")
        self.environment = dict(pair.split("=", 1) for pair in pairs if pair)
        return done.stdout


def path_first(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment whose PATH begins with a folder."""
    return {**environment, "PATH": f"{folder}{os.pathsep}{environment['PATH']}"}
