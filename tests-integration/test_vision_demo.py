"""The vision demo, as its users meet it: over a socket, in a terminal, offline."""

from __future__ import annotations

import base64

import openai
import pytest
from PIL import Image, ImageDraw
from servers import serving
from terminal import Terminal

from headrace import LLM, SamplingParams, demo

QUESTIONS = {
    "What colour is the circle?": "The circle is red.",
    "How many circles are there?": "There is one circle.",
    "What color is the background?": "The background is white.",
}


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A red circle on white, larger than the tower's image and not square."""
    path = tmp_path_factory.mktemp("pictures") / "a circle.png"
    image = Image.new("RGB", (400, 360), "white")
    ImageDraw.Draw(image).ellipse((120, 90, 290, 260), fill=(214, 39, 40))
    image.save(path)
    return path


@pytest.fixture(scope="module")
def server():
    with serving("--demo", "vision") as running:
        yield running


def content(picture, question):
    url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


def test_a_client_asks_about_a_picture(server, picture):
    client = openai.OpenAI(base_url=server.api, api_key="none")
    assert [model.id for model in client.models.list()] == ["headrace-demo-vision"]
    for question, answer in QUESTIONS.items():
        said = client.chat.completions.create(
            model="headrace-demo-vision",
            messages=[{"role": "user", "content": content(picture, question)}],
        )
        assert said.choices[0].message.content == answer


def test_without_a_picture_it_says_so(server):
    client = openai.OpenAI(base_url=server.api, api_key="none")
    said = client.chat.completions.create(
        model="headrace-demo-vision",
        messages=[{"role": "user", "content": "What is in the picture?"}],
    )
    assert said.choices[0].message.content == "I see no picture. Please send one."


def test_a_picture_is_dropped_on_the_terminal(server, picture, tmp_path):
    with Terminal("chat", "--url", server.api, XDG_STATE_HOME=str(tmp_path)) as chat:
        assert "shapes, colours and digits" in chat.shows("> ")
        chat.press(str(picture).replace(" ", "\\ ") + "\n")
        chat.shows("a circle.png goes with your next question")
        chat.shows("> ")
        chat.press("What colour is the circle?\n")
        chat.shows("The circle is red.")
        chat.shows("> ")
        chat.press(f"/attach {picture}x\n")
        chat.shows("cannot be attached")
        chat.shows("> ")


def test_offline_says_the_same(picture):
    llm = LLM(str(demo.path("vision")), max_model_len=512)
    chats = [[{"role": "user", "content": content(picture, question)}] for question in QUESTIONS]
    answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert [answer.outputs[0].text for answer in answers] == list(QUESTIONS.values())
