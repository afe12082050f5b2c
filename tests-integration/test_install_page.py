"""The page that leads from a clone to a command, and the Dockerfile: what they name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.serve import make_parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/install.md").read_text(encoding="utf-8")


def test_the_page_is_found():
    assert "install.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "(docs/install.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(install.md)" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_what_is_installed_from_the_clone_exists():
    named = set(re.findall(r"\./packages/([a-z]+)", PAGE))
    assert named
    for name in named:
        assert (ROOT / "packages" / name / "pyproject.toml").is_file(), name
    # "./packages/*" is handed to pip: nothing else may lie there.
    for folder in (ROOT / "packages").iterdir():
        assert (folder / "pyproject.toml").is_file(), folder


@pytest.mark.parametrize("words", re.findall(r"^\$ headrace serve(.*)$", PAGE, re.MULTILINE))
def test_commands_are_understood(words):
    make_parser().parse_args(shlex.split(words))


def test_flags_and_variables_exist():
    known = make_parser().format_help() + " ".join(
        word for action in make_parser()._actions for word in action.option_strings
    )
    table = PAGE.partition("## When something goes wrong")[2]
    for flag in re.findall(r"`(--[a-z-]+)", table):
        assert flag in known or flag == "--no-deps", flag
    for code in re.findall(r"HR-[A-Z]+-\d+", table):
        assert (ROOT / f"docs/errors/{code}.md").is_file(), code


def test_the_image_runs_without_rights_and_without_a_compiler():
    build, final = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    assert "g++" in build
    assert "g++" not in final
    assert "apt-get" not in final
    assert re.search(r"^USER headrace$", final, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\\\n.*/health", final, re.MULTILINE)
    words = re.search(r"^CMD \[(.*)\]$", final, re.MULTILINE)[1]
    command, *flags = [word.strip(' "') for word in words.split(",")]
    assert command == "serve"
    assert make_parser().parse_args(flags).host == "0.0.0.0"


def test_mirrors_of_the_image_are_on_the_page():
    arguments = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert arguments == ["TORCH_INDEX", "PIP_INDEX_URL"]
    for name in arguments:
        assert f"--build-arg {name}=" in PAGE, name
