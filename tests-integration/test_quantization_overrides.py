"""``--quantization-overrides``: served over a socket, told by inspect, refused where it cannot be meant."""

from __future__ import annotations

import json
import subprocess

import pytest
from forks import run_command
from posted import post
from servers import serving

from headrace_demo import model_path

OVERRIDES = {r"re:.*\.(gate|up|down)_proj$": "int8_weight_only", "lm_head": "none"}


def inspected(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command("inspect", *words)


def test_layers_have_the_methods_of_their_entries() -> None:
    done = inspected(
        str(model_path()), "-q", "q4_0", "--quantization-overrides", json.dumps(OVERRIDES), "--json"
    )
    assert done.returncode == 0, done.stderr
    linear = json.loads(done.stdout)["memory"]["linear"]
    found = {name: storage["bits"] for storage in linear for name in storage["names"]}
    assert found["lm_head"] == 16
    assert found["q_proj"] == found["o_proj"] == 4.5
    assert 8 < found["up_proj"] < 9
    assert 8 < found["down_proj"] < 9


def test_a_served_answer() -> None:
    words = ("--quantization", "int8", "--quantization-overrides", json.dumps({"lm_head": "none"}))
    with serving(*words) as server:
        body = {
            "max_tokens": 30, "temperature": 0,
            "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        }  # fmt: skip
        answer = post(f"{server.url}/v1/chat/completions", body)
    assert "12 + 7 = 19" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ('{"lm_head": "int9"}', "int9"),
        ('{"lm_head": 8}', "quantization_overrides.lm_head"),
        ('["lm_head"]', "quantization"),
        ('{"lm_haed": "int8"}', "'lm_haed' is no linear layer of the model"),
        ('{"re:(": "int8"}', "is not a pattern"),
        ('{"lm_head": "gptq"}', "quantization_overrides: 'lm_head': quantization 'gptq' needs"),
        ('{"re:.*q_proj": "int8"}', "these modules are one layer"),
    ],
)
def test_what_cannot_be_meant(overrides: str, message: str) -> None:
    words = ("--prompt", "Hello", "--max-tokens", "2", "--quantization-overrides", overrides)
    done = run_command("generate", *words)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_quantized_checkpoint(tmp_path) -> None:
    out = str(tmp_path / "out")
    run_command("quantize", str(model_path()), "--to", "int8", "--out", out).check_returncode()
    overrides = ("--quantization-overrides", '{"lm_head": "int8"}')
    done = run_command("generate", out, "--prompt", "Hello", *overrides)
    assert done.returncode != 0
    assert "quantized with 'compressed-tensors' already" in done.stderr
