"""Questions about a scene, in a few wordings each, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from vision_demo.pictures import COLOURS, SHAPES, Scene, Thing


class Exchange(NamedTuple):
    """A question, its answer, and the skill that it takes."""

    question: str
    answer: str
    skill: str


WITHOUT_PICTURE = (
    ("Hello!", "Hello! Show me a picture with shapes or a digit, and ask me about it."),
    ("Hi", "Hello! Show me a picture with shapes or a digit, and ask me about it."),
    ("Who are you?", "I am the headrace vision demo model. I know shapes, colours and digits."),
    ("What can you do?", "I can name shapes, colours and digits in a picture, and count to five."),
    ("What is in the picture?", "I see no picture. Please send one."),
    ("Describe the image.", "I see no picture. Please send one."),
    ("How many circles are there?", "I see no picture. Please send one."),
    ("What colour is it?", "I see no picture. Please send one."),
    ("Thank you!", "You are welcome!"),
)
"""What is said without a picture."""


def ask(scene: Scene, rng: random.Random) -> Exchange:
    """One exchange about a scene."""
    return rng.choice(_DIGIT if scene.digit is not None else _SHAPES)(scene, rng)


def _wording(rng: random.Random, *wordings: str) -> str:
    return rng.choice(wordings)


def _name(thing: Thing) -> str:
    if thing.count == 1:
        return f"{'an' if thing.colour == 'orange' else 'a'} {thing.colour} {thing.shape}"
    return f"{thing.count} {thing.colour} {thing.shape}s"


def _describe(scene: Scene, rng: random.Random) -> Exchange:
    question = _wording(
        rng,
        "What is in the picture?",
        "What is in this image?",
        "What do you see?",
        "Describe the picture.",
        "Describe this image.",
        "What's in this image?",
    )
    return Exchange(
        question, f"I see {_contents(scene)} on a {scene.background} background.", "describe"
    )


def _contents(scene: Scene) -> str:
    if scene.digit is not None:
        return f"the digit {scene.digit} in {scene.digit_colour}"
    return " and ".join(map(_name, sorted(scene.things, key=lambda thing: thing.shape)))


def _background(scene: Scene, rng: random.Random) -> Exchange:
    question = _wording(
        rng,
        "What colour is the background?",
        "What color is the background?",
        "Which background does it have?",
    )
    return Exchange(question, f"The background is {scene.background}.", "background")


def _count(scene: Scene, rng: random.Random) -> Exchange:
    shape = rng.choice([*(thing.shape for thing in scene.things), *SHAPES[: rng.randint(0, 5)]])
    found = next((thing.count for thing in scene.things if thing.shape == shape), 0)
    question = _wording(
        rng,
        f"How many {shape}s are there?",
        f"How many {shape}s do you see?",
        f"Count the {shape}s.",
    )
    answers = {0: f"There are no {shape}s.", 1: f"There is one {shape}."}
    return Exchange(question, answers.get(found, f"There are {found} {shape}s."), "count")


def _count_all(scene: Scene, rng: random.Random) -> Exchange:
    total = sum(thing.count for thing in scene.things)
    question = _wording(rng, "How many shapes are there?", "How many objects do you see?")
    return Exchange(question, "There is one." if total == 1 else f"There are {total}.", "count all")


def _colour(scene: Scene, rng: random.Random) -> Exchange:
    thing = rng.choice(scene.things)
    many = thing.count > 1
    subject = f"are the {thing.shape}s" if many else f"is the {thing.shape}"
    question = _wording(
        rng, f"What colour {subject}?", f"What color {subject}?", f"Which colour {subject}?"
    )
    verb = "s are" if many else " is"
    return Exchange(question, f"The {thing.shape}{verb} {thing.colour}.", "colour")


def _is_there(scene: Scene, rng: random.Random) -> Exchange:
    thing = rng.choice(scene.things)
    colour = thing.colour if rng.random() < 0.6 else rng.choice(list(COLOURS))
    shape = thing.shape if rng.random() < 0.7 else rng.choice(SHAPES)
    found = any((one.colour, one.shape) == (colour, shape) for one in scene.things)
    article = "an" if colour == "orange" else "a"
    question = _wording(
        rng, f"Is there {article} {colour} {shape}?", f"Do you see {article} {colour} {shape}?"
    )
    answer = (
        f"Yes, there is {article} {colour} {shape}."
        if found
        else f"No, there is no {colour} {shape}."
    )
    return Exchange(question, answer, "is there")


def _digit(scene: Scene, rng: random.Random) -> Exchange:
    question = _wording(
        rng,
        "Which digit is it?",
        "What digit do you see?",
        "What number is this?",
        "Read the digit.",
        "What does it say?",
    )
    return Exchange(question, f"It is the digit {scene.digit}.", "digit")


def _digit_colour(scene: Scene, rng: random.Random) -> Exchange:
    question = _wording(
        rng, "What colour is the digit?", "What color is the digit?", "Which colour is the digit?"
    )
    return Exchange(question, f"The digit is {scene.digit_colour}.", "digit colour")


_Ask = Callable[[Scene, random.Random], Exchange]
_SHAPES: tuple[_Ask, ...] = (
    _describe,
    _describe,
    _background,
    _count,
    _count,
    _count_all,
    _colour,
    _is_there,
)
_DIGIT: tuple[_Ask, ...] = (_describe, _background, _digit, _digit, _digit, _digit_colour)
