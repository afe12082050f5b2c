"""Pictures with a few coloured shapes, or one digit, and what is in them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIZE = 96
"""Pixels of a side, as the tower sees them."""
_FINE = 2
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 150, 60),
    "blue": (40, 90, 210),
    "yellow": (245, 205, 30),
    "purple": (130, 60, 170),
    "orange": (250, 130, 20),
    "black": (25, 25, 25),
}
BACKGROUNDS = {"white": (250, 250, 250), "grey": (170, 170, 170), "pink": (250, 200, 215)}
SHAPES = ("circle", "square", "triangle", "star", "heart")
MOST = 5
"""Objects of a picture."""


@dataclass(frozen=True)
class Thing:
    """`count` objects of one colour and shape."""

    colour: str
    shape: str
    count: int


@dataclass(frozen=True)
class Scene:
    """What a picture holds: things of which no two have the same shape, or a digit."""

    background: str
    things: tuple[Thing, ...]
    digit: int | None = None
    digit_colour: str = ""


def draw_scene(rng: random.Random) -> Scene:
    """A scene: a digit in one of four."""
    background = rng.choice(list(BACKGROUNDS))
    if rng.random() < 0.25:
        return Scene(background, (), rng.randrange(10), rng.choice(list(COLOURS)))
    kinds = rng.choice((1, 1, 2))
    total = rng.randint(kinds, MOST)
    shapes = rng.sample(SHAPES, kinds)
    counts = [total] if kinds == 1 else [first := rng.randint(1, total - 1), total - first]
    colours = [rng.choice(list(COLOURS)) for _ in shapes]
    return Scene(background, tuple(map(Thing, colours, shapes, counts)))


def paint(scene: Scene, rng: random.Random) -> Image.Image:
    """The scene in RGB, SIZE x SIZE pixels, anti-aliased; at times blurred, as enlarged pictures are."""
    side = SIZE * _FINE
    picture = Image.new("RGB", (side, side), _shade(BACKGROUNDS[scene.background], rng, 8))
    draw = ImageDraw.Draw(picture)
    if scene.digit is not None:
        _paint_digit(draw, scene, rng, side)
    for (x, y, radius), thing in zip(_places(scene, rng, side), _each(scene, rng), strict=True):
        colour = _shade(COLOURS[thing.colour], rng, 20)
        _paint_shape(draw, thing.shape, x, y, radius, colour, rng)
    if rng.random() < 0.3:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0, 2)))
    return picture.resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def _shade(colour: tuple[int, int, int], rng: random.Random, by: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + rng.randint(-by, by))) for part in colour)
    return red, green, blue


def _each(scene: Scene, rng: random.Random) -> list[Thing]:
    things = [thing for thing in scene.things for _ in range(thing.count)]
    rng.shuffle(things)
    return things


def _places(scene: Scene, rng: random.Random, side: int) -> list[tuple[float, float, float]]:
    """Middles and radii that leave room between the objects, each of another size."""
    total = sum(thing.count for thing in scene.things)
    largest = side * {0: 0.4, 1: 0.4, 2: 0.24}.get(total, 0.19)
    places: list[tuple[float, float, float]] = []
    while len(places) < total:
        radius = rng.uniform(side * 0.09, largest)
        x, y = (rng.uniform(radius, side - radius) for _ in range(2))
        if all(math.dist((x, y), (a, b)) > radius + other + 4 for a, b, other in places):
            places.append((x, y, radius))
        else:
            largest = max(side * 0.09, largest * 0.99)
    return places


def _paint_shape(
    draw: ImageDraw.ImageDraw,
    shape: str,
    x: float,
    y: float,
    radius: float,
    colour: tuple[int, int, int],
    rng: random.Random,
) -> None:
    turn = rng.uniform(-0.25, 0.25)
    match shape:
        case "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        case "square":
            _polygon(draw, x, y, [radius] * 4, turn + math.pi / 4, colour)
        case "triangle":
            _polygon(draw, x, y, [radius] * 3, turn - math.pi / 2, colour)
        case "star":
            _polygon(draw, x, y, [radius, radius * 0.42] * 5, turn - math.pi / 2, colour)
        case _:
            _heart(draw, x, y, radius, colour)


def _polygon(
    draw: ImageDraw.ImageDraw,
    x: float,
    y: float,
    radii: list[float],
    turn: float,
    colour: tuple[int, int, int],
) -> None:
    angles = [turn + 2 * math.pi * i / len(radii) for i in range(len(radii))]
    corners = [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(radii, angles)]
    draw.polygon(corners, fill=colour)


def _heart(
    draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: tuple[int, int, int]
) -> None:
    corners = []
    for i in range(60):
        t = 2 * math.pi * i / 60
        across = 16 * math.sin(t) ** 3
        down = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        corners.append((x + across * radius / 17, y - down * radius / 17))
    draw.polygon(corners, fill=colour)


def _paint_digit(draw: ImageDraw.ImageDraw, scene: Scene, rng: random.Random, side: int) -> None:
    font = ImageFont.load_default(size=rng.uniform(0.45, 0.95) * side)
    left, top, right, bottom = draw.textbbox((0, 0), str(scene.digit), font=font)
    x = rng.uniform(0, max(1, side - (right - left))) - left
    y = rng.uniform(0, max(1, side - (bottom - top))) - top
    colour = _shade(COLOURS[scene.digit_colour], rng, 20)
    width = rng.choice((0, 0, 2, 4))
    draw.text(
        (x, y), str(scene.digit), font=font, fill=colour, stroke_width=width, stroke_fill=colour
    )
