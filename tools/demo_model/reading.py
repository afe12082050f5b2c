"""Answering from a short context: the answer must be copied, for the words are drawn each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from demo_model.turns import Turn
from demo_model.words import CITIES, COLOURS, FOODS, HOBBIES, JOBS, NAMES, PETS, ROOMS, THINGS, Draw

NOT_SAID = "The context does not say that."


class Fact(NamedTuple):
    """A sentence, the questions that it answers, and its subject (unique within a context)."""

    sentence: str
    questions: tuple[str, ...]
    subject: str


def thing_in_room(draw: Draw) -> Fact:
    thing = f"{draw.pick(COLOURS)} {draw.open(THINGS)}" if draw.chance(0.6) else draw.open(THINGS)
    room = draw.open(ROOMS)
    where = draw.pick(("in the", "in the", "near the", "behind the"))
    questions = (
        f"Where is the {thing}?",
        f"where is the {thing}?",
        f"Where can I find the {thing}?",
    )
    return Fact(f"The {thing} is {where} {room}.", questions, thing)


def person_in_room(draw: Draw) -> Fact:
    name, room = draw.open(NAMES), draw.open(ROOMS)
    return Fact(f"{name} is in the {room}.", (f"Where is {name}?", f"where is {name}?"), name)


def person_has(draw: Draw) -> Fact:
    name, thing = draw.open(NAMES), f"{draw.pick(COLOURS)} {draw.open(THINGS)}"
    questions = (f"What does {name} have?", f"Who has the {thing}?", f"Who has a {thing}?")
    return Fact(f"{name} has a {thing}.", questions, name)


def person_likes(draw: Draw) -> Fact:
    name, liked = draw.open(NAMES), draw.open(draw.pick((FOODS, HOBBIES)))
    questions = (f"What does {name} like?", f"Who likes {liked}?")
    return Fact(f"{name} likes {liked}.", questions, name)


def person_lives(draw: Draw) -> Fact:
    name, city = draw.open(NAMES), draw.open(CITIES)
    questions = (f"Where does {name} live?", f"Who lives in {city}?")
    return Fact(f"{name} lives in {city}.", questions, name)


def person_age(draw: Draw) -> Fact:
    name, age = draw.open(NAMES), draw.between(5, 99)
    return Fact(f"{name} is {age} years old.", (f"How old is {name}?", f"how old is {name}"), name)


def person_job(draw: Draw) -> Fact:
    name, job = draw.open(NAMES), draw.open(JOBS)
    questions = (f"What does {name} do?", f"What is {name}'s job?", f"Who works as a {job}?")
    return Fact(f"{name} works as a {job}.", questions, name)


def person_pet(draw: Draw) -> Fact:
    name, pet, called = draw.open(NAMES), draw.pick(PETS), draw.open(NAMES)
    questions = (f"What is {name}'s {pet} called?", f"What is the name of {name}'s {pet}?")
    return Fact(f"{name}'s {pet} is called {called}.", questions, name)


def thing_price(draw: Draw) -> Fact:
    thing, price = f"{draw.pick(COLOURS)} {draw.open(THINGS)}", draw.between(2, 99)
    questions = (f"How much is the {thing}?", f"What does the {thing} cost?")
    return Fact(f"The {thing} costs {price} coins.", questions, thing)


_KINDS: tuple[Callable[[Draw], Fact], ...] = (
    thing_in_room,
    thing_in_room,
    thing_in_room,
    person_in_room,
    person_has,
    person_likes,
    person_lives,
    person_age,
    person_job,
    person_pet,
    thing_price,
)


def facts(draw: Draw, count: int) -> list[Fact]:
    """`count` facts, no two of which answer the same question; often of one kind, which is harder to read."""
    kinds = (draw.pick(_KINDS),) if draw.chance(0.35) else _KINDS
    found: list[Fact] = []
    while len(found) < count:
        fact = draw.pick(kinds)(draw)
        if not any(_could_be_confused(fact, other) for other in found):
            found.append(fact)
    return found


def _could_be_confused(one: Fact, other: Fact) -> bool:
    """Whether some question would have two answers, were both facts in a context."""
    same_question = not set(one.questions).isdisjoint(other.questions)
    return one.subject == other.subject or same_question


def reading(draw: Draw) -> tuple[list[Turn], str]:
    """One to three questions about one context, and a system message if the context went there."""
    known = facts(draw, draw.between(1, 5))
    context = " ".join(fact.sentence for fact in known)
    questions = [_question(draw, known) for _ in range(draw.pick((1, 2, 3, 4)))]
    if draw.chance(0.1):
        return questions, f"Context: {context}"
    first = questions[0]
    layout = draw.pick(
        (
            "Context: {c}\nQuestion: {q}",
            "Context: {c}\n\nQuestion: {q}",
            "Context: {c} Question: {q}",
            "Context: {c} {q}",
            "{c} {q}",
            "{c}\n{q}",
            "{c}\n\n{q}",
            "Read this: {c} {q}",
        )
    )
    user = layout.format(c=context, q=first.user)
    return [Turn(first.skill, user, first.answer, first.thought), *questions[1:]], ""


def _question(draw: Draw, known: list[Fact]) -> Turn:
    if draw.chance(0.1):
        absent = facts(draw, 1)[0]
        if not any(_could_be_confused(absent, fact) for fact in known):
            thought = "I looked for it in the context, but it is not there."
            return Turn("not in context", absent.questions[0], NOT_SAID, thought)
    fact = draw.pick(known)
    thought = f'The context says: "{fact.sentence}"'
    return Turn("context", draw.pick(fact.questions), fact.sentence, thought)
