"""A trained model hears audio, and the words are checked: from a file over HTTP to its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from servers import RunningServer, serving

FOLDER = Path(__file__).parent / "data" / "speech-fixture"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").is_file(),
    reason="no trained speech model: run tools/train_speech_fixture.py --start",
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(str(FOLDER), "--served-model-name", "ears", "--num-threads", "1") as running:
        yield running


def test_what_is_said_is_written_down(server: RunningServer) -> None:
    texts = json.loads((FOLDER / "spoken.json").read_text(encoding="utf-8"))
    assert texts
    wrong = {}
    with openai.OpenAI(base_url=server.api, api_key="none") as client:
        for name, text in texts.items():
            answer = client.audio.transcriptions.create(
                model="ears", file=(name, (FOLDER / name).read_bytes()), language="en"
            )
            if answer.text != text:
                wrong[name] = (text, answer.text)
    assert len(wrong) <= len(texts) // 8, wrong


def test_times_lie_where_words_are(server: RunningServer) -> None:
    name = next(iter(json.loads((FOLDER / "spoken.json").read_text(encoding="utf-8"))))
    with openai.OpenAI(base_url=server.api, api_key="none") as client:
        answer = client.audio.transcriptions.create(
            model="ears", file=(name, (FOLDER / name).read_bytes()), language="en",
            response_format="verbose_json",
        )  # fmt: skip
    (segment,) = answer.segments
    assert segment.start < 0.3
    assert abs(segment.end - float(answer.duration)) < 0.5
    assert segment.no_speech_prob < 0.5
