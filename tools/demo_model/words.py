# ruff: noqa: SIM905 - lists of words are easier to read, and to add to, as text
"""The words that the examples are made of, and a source of randomness that can hold some back.

A model that has seen only forty names learns the forty names; one that must also repeat invented
ones learns to copy. So open lists (names, places, things) are topped up with made-up words, and
about one in ten of all of them never appears in training: evaluation draws from those alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

NAMES = """Ada Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Rosa
Sam Tara Uma Victor Wendy Yara Zoe Alice Bob Carol Dan Eve Fred Gina Hugo Ivan Julia Karl Linda Mona
Noah Olga Peter Quinn Ruth Sara Tom Vera Will Anna Bruno Chloe Dora Elsa Felix Greta Hans Ingrid Jonas
Lars Mia Nora Otto Priya Ravi Sofia Tim Amir Bella Carlos Diana Erik Fatima George Hana Ines James
John Kenji Lena Max Mary Omar Pia Rita Sven Theo Lucy Alan Linus Aria Chen Dev Elena Gabriel Helen
Isaac Jane Kim Luis Marta Nick Olivia Pablo Rachel Simon Tessa Yuki Zara Arthur Beth Cleo""".split()

CITIES = """Paris London Berlin Madrid Rome Oslo Vienna Lisbon Tokyo Athens Dublin Cairo Delhi Lima
Boston Chicago Sydney Toronto Zurich Munich Milan Seoul Prague Warsaw Helsinki Geneva Hamburg Lyon
Porto Turin Bergen Kyoto Osaka Mumbai Nairobi Lagos Denver Seattle Austin Dallas Miami Bristol Leeds
Glasgow Brussels Budapest Stockholm Copenhagen Amsterdam Barcelona Beijing Moscow Havana Quito""".split()

ROOMS = """kitchen garden bedroom bathroom office garage hall attic cellar library shed school park
shop station museum barn forest market tower study car closet gym cafe hotel bank hospital church
castle cave harbour tent basement balcony""".split()

THINGS = """box ball book cup key lamp hat bag coat shoe phone pen clock chair table bottle knife spoon
plate map letter ring coin drum flute kite rope basket candle mirror pillow blanket umbrella ticket
camera radio guitar hammer ladder bucket brush towel scarf glove watch apple cake robot toy stone
vase flag bell boat bike wallet""".split()

COLOURS = (
    """red blue green yellow black white brown pink purple orange grey golden silver""".split()
)

FOODS = """apples bread cheese soup pizza pasta rice cake honey tea coffee milk fish eggs grapes plums
pears cherries nuts salad chocolate bananas lemons noodles tomatoes carrots olives beans corn
pancakes""".split()

HOBBIES = """music chess football reading cooking painting hiking tennis dancing swimming sailing
gardening singing running films poetry history maths jazz fishing skating cycling knitting
puzzles""".split()

PETS = "dog cat horse rabbit parrot fish bird turtle hamster pony".split()

JOBS = """teacher doctor baker farmer pilot painter nurse driver lawyer writer singer cook builder
plumber engineer gardener sailor judge dentist tailor""".split()

WORDS = """sun moon river tree house mountain road water fire wind snow rain cloud star bird flower
leaf grass sand sea island bridge door window wall floor roof street town village field hill lake
light night day morning evening winter summer spring autumn friend child mother father brother
sister music song dance story game paper glass gold iron wood wool silk salt sugar pepper butter
happy quick slow small big cold warm soft hard new old young long short open dark bright""".split()

_STARTS = "b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sh st t th tr v w y z".split()
_VOWELS = "a e i o u a e i o u ai ea ee oo ou".split()
_ENDS = ["", "", "n", "r", "l", "s", "t", "m", "ck", "nd", "x", "rt", "lla", "ro", "nia", "vik"]

_HELD_OUT_ONE_IN = 10


def is_held_out(text: str) -> bool:
    """Whether evaluation owns this string. A checksum, so that it never depends on a seed."""
    return zlib.crc32(text.lower().encode()) % _HELD_OUT_ONE_IN == 0


class Draw:
    """Random choices for one stream of examples: either training's, or evaluation's."""

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        self.rng = random.Random(f"{seed}/{held_out}")
        self.held_out = held_out

    def pick(self, items: Sequence[T]) -> T:
        """One item of a closed list: training and evaluation share it."""
        return items[int(self.rng.random() * len(items))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return self.rng.randint(low, high)

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in random order."""
        return self.rng.sample(list(items), count)

    def open(self, bank: Sequence[str], *, invented: float = 0.25) -> str:
        """One item of an open list, sometimes made up, from this stream's share of it."""
        for _ in range(10_000):
            word = self._invent() if self.chance(invented) else self.pick(bank)
            word = word.capitalize() if bank[0][0].isupper() else word
            if is_held_out(word) == self.held_out:
                return word
        raise AssertionError("no word of this bank belongs to this stream")

    def opens(self, bank: Sequence[str], count: int, *, invented: float = 0.25) -> list[str]:
        """`count` different items of an open list."""
        found: list[str] = []
        while len(found) < count:
            word = self.open(bank, invented=invented)
            if word not in found:
                found.append(word)
        return found

    def _invent(self) -> str:
        body = "".join(self.pick(_STARTS) + self.pick(_VOWELS) for _ in range(self.between(1, 2)))
        return body + self.pick(_ENDS)
