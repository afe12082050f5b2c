"""Adding and subtracting small numbers, and the other tasks with a mechanical answer.

Digits are one token each, so a sum can be learnt digit by digit instead of as ten thousand facts;
with reasoning on, the thought walks the columns the way a child writes them.
"""

from __future__ import annotations

from collections.abc import Callable

from demo_model.turns import Turn
from demo_model.words import COLOURS, FOODS, NAMES, THINGS, WORDS, Draw

_ADD = (
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "what is {a} plus {b}",
    "What's {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "Add {a} and {b}.",
    "Please add {a} and {b}",
    "Can you add {a} and {b}?",
    "How much is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}",
    "What is the sum of {a} and {b}?",
    "And {a} + {b}?",
    "I have {a} {things} and get {b} more. How many do I have?",
    "If I have {a} {things} and buy {b} more, how many {things} do I have?",
    "{name} has {a} {things} and finds {b} more. How many {things} are there now?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "what is {a} minus {b}",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "I have {a} {things} and lose {b}. How many are left?",
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
)
_TOO_HARD = (
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "{a} x {b}",
    "Multiply {a} by {b}.",
    "What is {a} / {b}?",
    "Divide {a} by {b}.",
    "What is {c} + {b}?",
    "What is {c} - {d}?",
    "{c} + {d}",
    "What is the square root of {c}?",
)
TOO_HARD = "I can only add and subtract numbers from 0 to 99."


def _pair_is_held_out(a: int, b: int) -> bool:
    """In this order: b + a may be in training, and a subtraction may come from either order."""
    return (a * 7 + b * 3) % 10 == 4


# Small sums are what people try first, so training sees more of them than chance would draw.
_LARGEST = (9, 20, 20, 20, 20, 99, 99, 99)


def _pair(draw: Draw, largest: int | None) -> tuple[int, int]:
    while True:
        high = largest or draw.pick(_LARGEST)
        a, b = draw.between(0, high), draw.between(0, high)
        if _pair_is_held_out(a, b) == draw.held_out:
            return a, b


def add(draw: Draw, largest: int | None = None) -> Turn:
    """A sum of numbers up to `largest`, or of the mixture of sizes that training wants."""
    a, b = _pair(draw, largest)
    text = _say(draw, _ADD, a, b)
    return Turn("add", text, f"{a} + {b} = {a + b}.", _add_thought(a, b))


def subtract(draw: Draw, largest: int | None = None) -> Turn:
    a, b = sorted(_pair(draw, largest), reverse=True)
    text = _say(draw, _SUBTRACT, a, b)
    return Turn("subtract", text, f"{a} - {b} = {a - b}.", _subtract_thought(a, b))


def too_hard(draw: Draw) -> Turn:
    a, b = draw.between(2, 99), draw.between(2, 99)
    c, d = draw.between(100, 9999), draw.between(100, 999)
    text = draw.pick(_TOO_HARD).format(a=a, b=b, c=c, d=d)
    return Turn("limits", text, TOO_HARD, "This is beyond the sums that I can do.")


def _say(draw: Draw, phrasings: tuple[str, ...], a: int, b: int) -> str:
    phrasing = draw.pick(phrasings)
    thing = draw.pick(THINGS) + "s" if draw.chance(0.6) else draw.pick(FOODS)
    name = draw.open(NAMES) if "{name}" in phrasing else ""
    return phrasing.format(a=a, b=b, things=thing, name=name)


def _add_thought(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    carried = f", write {ones % 10}, carry 1" if carry else f", write {ones}, carry 0"
    return (
        f"Ones: {a % 10} + {b % 10} = {ones}{carried}. "
        f"Tens: {a // 10} + {b // 10} + {carry} = {tens}. So {a + b}."
    )


def _subtract_thought(a: int, b: int) -> str:
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow - b % 10
    return (
        f"Ones: {a % 10 + 10 * borrow} - {b % 10} = {ones}, borrow {borrow}. "
        f"Tens: {a // 10} - {b // 10} - {borrow} = {a // 10 - b // 10 - borrow}. So {a - b}."
    )


def count(draw: Draw) -> Turn:
    """Long answers, for watching text stream."""
    length = draw.between(2, 12) if draw.chance(0.6) else draw.between(13, 40)
    start = 1 if draw.chance(0.4) else draw.between(0, 99 - length)
    stop = start + length
    numbers = list(range(start, stop + 1))
    asks: tuple[str, ...]
    if draw.chance(0.25):
        numbers.reverse()
        asks = ("Count down from {a} to {b}.", "count backwards from {a} to {b}")
    elif start == 1 and draw.chance(0.5):
        asks = ("Count to {b}.", "Please count to {b}", "Can you count to {b}?")
    else:
        asks = (
            "Count from {a} to {b}.",
            "count from {a} to {b}",
            "Please count from {a} to {b}.",
            "Can you count from {a} to {b}?",
            "List the numbers from {a} to {b}.",
        )
    text = draw.pick(asks).format(a=numbers[0], b=numbers[-1])
    answer = ", ".join(map(str, numbers)) + "."
    thought = f"I start at {numbers[0]} and stop at {numbers[-1]}."
    return Turn("count", text, answer, thought)


def repeat(draw: Draw) -> Turn:
    phrase = _phrase(draw, draw.between(1, 10))
    ask = draw.pick(
        (
            "Repeat after me: {}",
            "repeat after me: {}",
            "Repeat: {}",
            "Please repeat: {}",
            "Say: {}",
            "Echo: {}",
            "Say this back to me: {}",
        )
    )
    return Turn("repeat", ask.format(phrase), phrase, "I repeat the words exactly.")


def reverse(draw: Draw) -> Turn:
    words = _phrase(draw, draw.between(2, 6)).split()
    ask = draw.pick(
        ("Reverse these words: {}", "Reverse the words: {}", "Say these words backwards: {}")
    )
    thought = f"There are {len(words)} words. The last one comes first."
    return Turn("reverse", ask.format(" ".join(words)), " ".join(reversed(words)), thought)


def spell(draw: Draw) -> Turn:
    """From closed lists: the letters inside a token must be learnt, they cannot be copied."""
    word = draw.pick(draw.pick((WORDS, THINGS, COLOURS, NAMES)))
    ask = draw.pick(
        ("Spell {}.", "Spell the word {}.", "spell {}", "How do you spell {}?", "Can you spell {}?")
    )
    answer = "-".join(word.upper()) + "."
    return Turn("spell", ask.format(word), answer, f"The word is {word}. I say each letter.")


def _phrase(draw: Draw, length: int) -> str:
    banks = (WORDS, THINGS, COLOURS, FOODS, NAMES)
    words = [
        str(draw.between(0, 99)) if draw.chance(0.08) else draw.open(draw.pick(banks))
        for _ in range(length)
    ]
    return " ".join(words)


MECHANICAL: tuple[tuple[Callable[[Draw], Turn], float], ...] = (
    (count, 3.0),
    (repeat, 5.0),
    (reverse, 2.0),
    (spell, 1.5),
    (too_hard, 0.7),
)
