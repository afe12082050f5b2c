"""Each layout behind a real socket: answers, whole and streamed, have the bits of ``LLM`` in that layout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from layouts import KINDS, LAYOUTS, SERVED, Family, Said, said
from posted import post, stream
from servers import serving

from headrace import LLM
from headrace_testing.sampling import todays

SHOWN = {
    "-tp 2": "quantized mixture",
    "-tp 4": "vision",
    "-pp 2": "hybrid mixture",
    "-pp 3": "vision",
    "-dp 2": "hybrid",
    "-tp 2 -ep": "latent",
    "-tp 2 -pp 2": "dense",
    "-dp 2 -ep": "mixture",
}
"""Layout -> the family that is served in it."""


def tokens_of(choices: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Tokens and log-probabilities of an answer, or of the pieces of one."""
    found: list[tuple[str, float]] = []
    for choice in choices:
        entry = choice.get("logprobs") or {}
        if "content" in entry:
            found += [(one["token"], one["logprob"]) for one in entry["content"] or ()]
        elif entry:
            found += zip(entry["tokens"], entry["token_logprobs"], strict=True)
    return [(int(token.removeprefix("token_id:")), logprob) for token, logprob in found]


def text_of(choices: Sequence[dict[str, Any]]) -> str:
    """What is written in an answer, or in the pieces of one."""
    messages = [one.get("message") or one.get("delta") or {} for one in choices]
    return "".join(
        one.get("text") or message.get("content") or ""
        for one, message in zip(choices, messages, strict=True)
    )


def asked(family: Family, api: str) -> tuple[list[Any], list[Any]]:
    """The choices of whole answers, and of the events of streams, of all requests side by side."""
    url = f"{api}/{'chat/completions' if family.chats else 'completions'}"
    bodies = [family.body(request) for request in family.requests]
    with ThreadPoolExecutor(2 * len(bodies)) as pool:
        whole = [pool.submit(post, url, body) for body in bodies]
        streamed = [pool.submit(stream, url, body) for body in bodies]
        answers = [future.result()["choices"] for future in whole]
        events = [[c for event in future.result() for c in event["choices"]] for future in streamed]
    return answers, events


@pytest.mark.parametrize("flags", todays(SHOWN, days=8))
def test_a_served_layout_says_what_it_says_offline(flags: str, tmp_path: Path) -> None:
    family, layout = KINDS[SHOWN[flags]], LAYOUTS[flags]
    family.save(tmp_path)
    with LLM(str(tmp_path), **family.engine(**layout.settings)) as llm:
        outputs = family.ask(llm, family.requests)
    expected: Said = said(outputs)
    words = ["--model", str(tmp_path), "--served-model-name", SERVED, *family.argv, *layout.argv]
    with serving(*words) as server:
        answers, events = asked(family, server.api)
    assert [tokens_of(choices) for choices in answers] == expected
    assert [tokens_of(choices) for choices in events] == expected
    texts = [output.outputs[0].text for output in outputs]
    assert [text_of(choices) for choices in answers] == texts
    assert [text_of(choices) for choices in events] == texts


def test_every_layout_is_served() -> None:
    assert list(SHOWN) == list(LAYOUTS)
