"""Files that begin with a byte order mark, as editors on Windows write them: the mark is ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.arguments import Parser
from headrace.bench.datasets import _opened
from headrace.bench.sweep import option_maps
from headrace.cli.schema import _params, _parser
from headrace.multi_model.entries import read_file


@pytest.fixture
def marked(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        return path

    return write


@pytest.mark.parametrize("name", ["models.json", "models.yaml"])
def test_models(marked, name):
    entries = [{"name": "a", "model": "m"}]
    assert read_file(marked(name, json.dumps(entries))) == entries


def test_flags(marked):
    parser = Parser(prog="test")
    parser.add_model()
    parser.add_argument("--max-tokens", type=int)
    assert parser.parse_args(["--config", str(marked("f.yaml", "max-tokens: 3\n"))]).max_tokens == 3


def test_constraints(marked):
    for name, text in (("a.json", "{}"), ("a.regex", "a+"), ("a.choices", '["a"]')):
        kind = {"a.json": "json", "a.regex": "regex", "a.choices": "choice"}[name]
        parsed = _parser().parse_args(["check", str(marked(name, text)), "--kind", kind])
        assert getattr(_params(parsed), kind) in (text, ["a"])


def test_benchmarks(marked):
    assert option_maps(str(marked("sweep.json", '[{"a": 1}]'))) == [{"a": 1}]
    with _opened(str(marked("prompts.jsonl", "{}")), "custom") as file:
        assert file.read() == "{}"
