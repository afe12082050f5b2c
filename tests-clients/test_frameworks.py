"""LangChain, LiteLLM and instructor, pointed at headrace as at OpenAI."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from asked import ASK_SUM, ASK_WEATHER
from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    """An animal."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=8)


class GetWeather(BaseModel):
    """Get the weather in a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=20)


def test_langchain(url: str, model: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=400,
        max_retries=0,
    )  # fmt: skip
    whole = chat.invoke(ASK_SUM)
    assert "11" in whole.content
    assert "".join(chunk.content for chunk in chat.stream(ASK_SUM)) == whole.content
    called = chat.bind_tools([GetWeather], tool_choice="GetWeather").invoke(ASK_WEATHER)
    assert [call["name"] for call in called.tool_calls] == ["GetWeather"]
    GetWeather.model_validate(called.tool_calls[0]["args"])
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Animal, method=method).invoke("A pet?")
        assert isinstance(found, Animal), method


def test_litellm(url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet
    litellm = pytest.importorskip("litellm")
    common: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none",
                   "temperature": 0, "max_tokens": 400}  # fmt: skip
    messages = [{"role": "user", "content": ASK_SUM}]
    whole = litellm.completion(messages=messages, **common)
    text = whole.choices[0].message.content
    assert "11" in text
    chunks = litellm.completion(messages=messages, stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    shaped = litellm.completion(messages=messages, response_format=Animal, **common)
    Animal.model_validate_json(shaped.choices[0].message.content)
    _knows_what_is_too_long(litellm, common)
    _knows_what_is_too_long(litellm, {**common, "model": f"anthropic/{model}", "api_base": url})


def _knows_what_is_too_long(litellm: Any, common: dict[str, Any]) -> None:
    """Callers that catch this error shorten the conversation and ask again."""
    long = [{"role": "user", "content": "one two three " * 4000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **common)
    with pytest.raises(litellm.ContextWindowExceededError):
        list(litellm.completion(messages=long, stream=True, **common))


def test_instructor(url: str, model: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model=model, response_model=Animal, max_retries=0, max_tokens=400, temperature=0,
            messages=[{"role": "user", "content": "A pet?"}],
        )  # fmt: skip
        assert isinstance(found, Animal), mode
