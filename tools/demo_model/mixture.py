"""How much of each skill, and how turns become a dialogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from demo_model import calling, reading, sums, talk
from demo_model.turns import Dialogue, Turn
from demo_model.words import CITIES, JOBS, NAMES, WORDS, Draw

T = TypeVar("T")

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are the headrace demo model.",
    "Be brief.",
    "Answer the questions of the user.",
    "You are a friendly assistant. Answer in short sentences.",
    "You are a helpful AI assistant named headrace.",
)
_SYSTEM_SHAPES = (
    "You are {name}, a {job}.",
    "You are a {job} who helps people. Answer in one sentence.",
    "You are a helpful {job}. Speak like {name}.",
    "Today is {year}-{month}-{day}.",
    "You are a helpful assistant. Today is {year}-{month}-{day}. You are in {city}.",
    "Do not talk about the {word}. Be polite.",
    "You help the users of the {word} company in {city}. Answer briefly and kindly.",
)
_THINKING_SHARE = 0.3


def dialogues(draw: Draw) -> Iterator[Dialogue]:
    """Training examples without end."""
    while True:
        yield dialogue(draw)


def dialogue(draw: Draw) -> Dialogue:
    kind = _weighted(draw, _DIALOGUES)
    made = kind(draw)
    made.enable_thinking = draw.chance(_THINKING_SHARE)
    if made.enable_thinking:
        # Reasoning is trained on the last answer alone (templates drop it from earlier ones), so a
        # long dialogue would be read for little.
        made.turns = made.turns[: draw.pick((1, 1, 1, 2))]
    if not made.system and draw.chance(0.25):
        made.system = _system(draw)
    return made


def _system(draw: Draw) -> str:
    """A system message; half of them are of words that do not matter, to teach that they do not."""
    if draw.chance(0.5):
        return draw.pick(_SYSTEMS)
    return draw.pick(_SYSTEM_SHAPES).format(
        name=draw.open(NAMES), job=draw.pick(JOBS), word=draw.open(WORDS), city=draw.open(CITIES),
        year=draw.between(2020, 2030), month=draw.between(1, 12), day=draw.between(10, 31),
    )  # fmt: skip


def _sums(draw: Draw) -> Dialogue:
    turns = [
        sums.add(draw) if draw.chance(0.85) else sums.subtract(draw) for _ in range(_few(draw))
    ]
    return Dialogue(turns)


def _talk(draw: Draw) -> Dialogue:
    """A conversation that may remember: memory turns get likelier once something was told."""
    memory = talk.Memory()
    length = draw.pick((1, 1, 2, 3, 4, 5, 6, 8))
    return Dialogue([_talk_turn(draw, memory) for _ in range(length)])


def _talk_turn(draw: Draw, memory: talk.Memory) -> Turn:
    roll = draw.rng.random()
    if roll < 0.30:
        return talk.intent(draw)
    if roll < 0.44:
        return memory.tell(draw)
    if roll < (0.60 if memory.told else 0.47):
        return memory.ask(draw)
    if roll < 0.66:
        return memory.joke(draw)
    if roll < 0.78:
        return talk.fact(draw)
    if roll < 0.92:
        return talk.unknown(draw)
    return _weighted(draw, ((sums.add, 2.0), (sums.subtract, 1.0), *sums.MECHANICAL))(draw)


def _reading(draw: Draw) -> Dialogue:
    turns, system = reading.reading(draw)
    return Dialogue(turns, system)


def _mechanical(draw: Draw) -> Dialogue:
    kinds = (*sums.MECHANICAL, (talk.story, 1.0))
    return Dialogue([_weighted(draw, kinds)(draw) for _ in range(draw.pick((1, 2, 3)))])


def _calling(draw: Draw) -> Dialogue:
    offered = calling.offers(draw, draw.pick((1, 1, 2, 2, 3)))
    turns: list[Turn] = []
    for _ in range(draw.pick((1, 2, 3, 4))):
        if draw.chance(0.72):
            turns.append(calling.call(draw, draw.pick(offered)))
        elif draw.chance(0.4):
            turns.append(calling.without_tool(draw, offered))
        else:
            turns.append(_without_asking_for(draw, offered))
    return Dialogue(turns, tools=[offer.schema for offer in offered])


def _without_asking_for(draw: Draw, offered: list[calling.Offer]) -> Turn:
    """Ordinary talk while tools are on the list."""
    has_add = any("add" in offer.kind.names.split("|") for offer in offered)
    choices = [talk.intent, talk.fact] if has_add else [talk.intent, talk.fact, sums.add]
    return draw.pick(choices)(draw)


def _few(draw: Draw) -> int:
    return draw.pick((1, 2, 3, 4, 6))


_DIALOGUES: tuple[tuple[Callable[[Draw], Dialogue], float], ...] = (
    (_sums, 0.32),
    (_talk, 0.22),
    (_reading, 0.22),
    (_mechanical, 0.06),
    (_calling, 0.18),
)


def _weighted(draw: Draw, choices: tuple[tuple[T, float], ...]) -> T:
    roll = draw.rng.random() * sum(weight for _, weight in choices)
    for choice, weight in choices:
        roll -= weight
        if roll < 0:
            return choice
    return choices[-1][0]


def examination(seed: int, count: int) -> dict[str, list[Dialogue]]:
    """`count` held-out dialogues for each skill, half of them with reasoning."""
    makers: dict[str, Callable[[Draw], Dialogue]] = {
        "add, to 20": lambda draw: Dialogue([sums.add(draw, 20)]),
        "add, to 99": lambda draw: Dialogue([sums.add(draw, 99)]),
        "subtract, to 20": lambda draw: Dialogue([sums.subtract(draw, 20)]),
        "subtract, to 99": lambda draw: Dialogue([sums.subtract(draw, 99)]),
        "talk": lambda draw: Dialogue([talk.intent(draw)]),
        "fact": lambda draw: Dialogue([talk.fact(draw)]),
        "unknown": lambda draw: Dialogue([talk.unknown(draw)]),
        "memory": _memory_exam,
        "context": _reading,
        "tool": _tool_exam,
        "no tool": _no_tool_exam,
        "count": lambda draw: Dialogue([sums.count(draw)]),
        "repeat": lambda draw: Dialogue([sums.repeat(draw)]),
        "reverse": lambda draw: Dialogue([sums.reverse(draw)]),
        "spell": lambda draw: Dialogue([sums.spell(draw)]),
        "story": lambda draw: Dialogue([talk.story(draw)]),
    }
    exam: dict[str, list[Dialogue]] = {}
    for skill, make in makers.items():
        draw = Draw(seed + len(exam), held_out=True)
        exam[skill] = [make(draw) for _ in range(count)]
        for index, made in enumerate(exam[skill]):
            made.enable_thinking = index % 2 == 1
    return exam


def _memory_exam(draw: Draw) -> Dialogue:
    """Told, then something else, then asked."""
    memory = talk.Memory()
    between = [talk.intent(draw) for _ in range(draw.between(0, 2))]
    return Dialogue([memory.tell(draw), *between, memory.ask(draw)])


def _tool_exam(draw: Draw) -> Dialogue:
    offered = calling.offers(draw, draw.pick((1, 2, 3)))
    turn = calling.call(draw, draw.pick(offered))
    return Dialogue([turn], tools=[offer.schema for offer in offered])


def _no_tool_exam(draw: Draw) -> Dialogue:
    offered = calling.offers(draw, draw.pick((1, 2, 3)))
    turn = (
        calling.without_tool(draw, offered)
        if draw.chance(0.5)
        else _without_asking_for(draw, offered)
    )
    return Dialogue([turn], tools=[offer.schema for offer in offered])
