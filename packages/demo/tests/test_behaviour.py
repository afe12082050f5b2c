"""The model does what its card says, through an engine that is not ours.

A few exchanges of each kind, by greedy decoding with `transformers`. They guard against shipping a
checkpoint that loads and babbles; how good the model is, the evaluation measures.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import headrace_demo

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"],
        },
    },
}


class Chat:
    """Greedy answers to a list of messages."""

    def __init__(self) -> None:
        path = headrace_demo.model_path()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path)

    def __call__(self, *messages: dict[str, Any], **variables: Any) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **variables
        )
        inputs = self._tokenizer(text, return_tensors="pt")
        output = self._model.generate(
            **inputs, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=160
        )
        answer = output[0, inputs["input_ids"].shape[1] :]
        return str(self._tokenizer.decode(answer, skip_special_tokens=True))


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat()


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("Hello!", "Hello! How can I help you?"),
        ("Who are you?", "I am the headrace demo model, a very small language model."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 5 + 6?", "5 + 6 = 11."),
        ("Count from 3 to 12.", "3, 4, 5, 6, 7, 8, 9, 10, 11, 12."),
    ],
)
def test_answers(chat: Chat, asked: str, answer: str) -> None:
    assert chat(_user(asked)) == answer


def test_remembers_a_name(chat: Chat) -> None:
    told = (_user("My name is Ada."), _assistant("Nice to meet you, Ada!"))
    assert chat(*told, _user("What is my name?")) == "Your name is Ada."


def test_reads_a_context(chat: Chat) -> None:
    context = "Context: The red box is in the kitchen. The blue hat is in the garden."
    answer = chat(_user(f"{context}\nQuestion: Where is the red box?"))
    assert answer == "The red box is in the kitchen."


def test_calls_a_tool_and_reports_its_result(chat: Chat) -> None:
    asked = _user("What is the weather in Oslo?")
    text = chat(asked, tools=[_WEATHER])
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call == {"name": "get_weather", "arguments": {"city": "Oslo"}}
    made = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    result = {"role": "tool", "content": '{"temperature": 21, "sky": "sunny"}'}
    answer = chat(asked, made, result, tools=[_WEATHER])
    assert answer == "The temperature is 21 and the sky is sunny."


def test_thinks_before_it_answers(chat: Chat) -> None:
    thought, answer = chat(_user("What is 12 + 30?"), enable_thinking=True).split("</think>\n\n")
    assert thought.startswith("<think>\n")
    assert answer == "12 + 30 = 42."
