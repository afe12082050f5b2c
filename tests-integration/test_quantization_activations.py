"""``--quantization-activations``: what it changes in the numbers, served over a socket, refused by name."""

from __future__ import annotations

import pytest
from forks import run_command
from posted import post
from servers import serving

from headrace import LLM, SamplingParams


def logprobs(quantization: str, activations: str) -> list[float]:
    model = LLM(quantization=quantization, quantization_activations=activations)
    (output,) = model.generate(
        "What is 12 + 7?", SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    )
    found = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
    model.close()
    return found


@pytest.mark.parametrize("quantization", ["q4_k", "nf4", "int8"])
def test_it_rounds_activations_and_no_more(quantization: str) -> None:
    auto, floats, integers = (logprobs(quantization, form) for form in ("auto", "float", "int8"))
    assert floats != integers
    assert floats == pytest.approx(integers, abs=1)  # nf4 without AMX, in float32: 0.54
    if quantization == "int8":  # whose head takes activations as they are
        assert auto not in (floats, integers)
    else:
        assert auto == floats


def test_a_served_answer() -> None:
    with serving("--quantization", "q8_0", "--quantization-activations", "int8") as server:
        body = {
            "max_tokens": 30, "temperature": 0,
            "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        }  # fmt: skip
        answer = post(f"{server.url}/v1/chat/completions", body)
    assert "12 + 7 = 19" in answer["choices"][0]["message"]["content"]


def test_another_form_is_refused() -> None:
    done = run_command("generate", "--prompt", "Hello", "--quantization-activations", "int4")
    assert done.returncode != 0
    assert "int4" in done.stderr
    assert "int8" in done.stderr
    assert "Traceback" not in done.stderr
