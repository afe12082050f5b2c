"""``headrace quantize``: the demo model in fewer bits, measured and served over a socket; what goes wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from forks import run_command
from posted import post
from servers import serving

from headrace_demo import model_path

TEXT = "The sky is blue. Five plus three is eight. Say these words backwards: pink bird 91. " * 12
ANSWER = "12 + 7 = 19"
MOST = {"int8": 0.05, "fp8": 0.2, "q8_0": 0.05, "q6_k": 0.2, "q4_k": 1.5, "awq": 1.5, "int4": 1.5}
"""Format -> most divergence of the demo model, in nats."""


def quantize(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command("quantize", *words)


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("name", MOST)
def test_the_demo_model_is_written_measured_and_served(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = str(tmp_path / "out")
    done = quantize(str(model_path()), "--to", name, "--out", out, "--text", str(text), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["quantized_layers"] >= 30
    assert found["bytes_after"] < 0.6 * found["bytes_before"]
    assert found["bytes_after"] == sum(
        tensor["data_offsets"][1] - tensor["data_offsets"][0]
        for file in Path(out).glob("*.safetensors")
        for key, tensor in _header(file).items()
        if key != "__metadata__"
    )
    assert 0 < found["after"]["divergence"] < MOST[name]
    assert found["after"]["perplexity"] != found["before"]["perplexity"]
    assert found["before"]["divergence"] == 0
    assert found["before"]["same_likeliest"] == 1
    with serving(out) as server:
        body = {
            "model": out, "max_tokens": 30, "temperature": 0,
            "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        }  # fmt: skip
        answer = post(f"{server.url}/v1/chat/completions", body)
    said = answer["choices"][0]["message"]["content"]
    assert ANSWER in said or name in ("q4_k", "awq", "int4"), said
    assert said


def _header(file: Path) -> dict:
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def test_the_report_for_people(tmp_path: Path) -> None:
    done = quantize(str(model_path()), "--to", "q5_k", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "linear layers in q5_k" in done.stdout
    assert "MiB ->" in done.stdout
    assert f"next: headrace serve {tmp_path}" in done.stdout
    assert "perplexity" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "q4k", "--out", "OUT"), "q4_k"),
        (("--to", "q4_k"), "--out"),
        (("--to", "q4_k", "--out", "OUT", "--tokens", "1"), "--tokens 1: must be at least 2"),
        (("--to", "q4_k", "--out", "OUT", "--text", "absent.txt"), "absent.txt"),
        (("--to", "q4_k", "--out", "OUT", "--text", "/dev/null"), "--text: has 0 tokens"),
        (
            ("--to", "q4_k", "--out", "OUT", "-q", "int8"),
            "--quantization cannot be combined with --to",
        ),
    ],
)
def test_what_goes_wrong_is_told_before_anything_is_written(words, message, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = quantize(str(model_path()), *(str(out) if word == "OUT" else word for word in words))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(out.glob("*"))


def test_settings_count_while_the_text_is_read(tmp_path: Path) -> None:
    """With a cache of 4 bits both models read otherwise."""
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("--to", "q8_0", "--out", str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"))
    words = (*words, "--tokens", "64")
    found = [
        json.loads(quantize(str(model_path()), *words, "--json", *more).stdout)
        for more in ((), ("--kv-cache-dtype", "int4_per_token_head"))
    ]
    for model in ("before", "after"):
        assert found[0][model]["perplexity"] != found[1][model]["perplexity"]


def test_an_interrupted_run_is_told_how_to_go_on(tmp_path: Path) -> None:
    """The same command again goes on, and after the end it only measures."""
    out, text = tmp_path / "sp ace", tmp_path / "text.txt"
    text.write_text(TEXT)
    first = quantize(str(model_path()), "--to", "q8_0", "--out", str(out))
    assert f"next: headrace serve '{out}'" in first.stdout
    again = quantize(str(model_path()), "--to", "q8_0", "--out", str(out), "--text", str(text))
    assert again.returncode == 0, again.stderr
    assert "1 files were there from an earlier run" in again.stdout
    assert "divergence" in again.stdout
    other = quantize(str(model_path()), "--to", "q4_0", "--out", str(out))
    assert other.returncode != 0
    assert "another model, format or setting" in other.stderr


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert quantize(str(model_path()), "--to", "int8", "--out", str(first)).returncode == 0
    done = quantize(str(first), "--to", "q4_k", "--out", str(second))
    assert done.returncode != 0
    assert "quantized with 'compressed-tensors' already" in done.stderr
    assert "Traceback" not in done.stderr
