"""Numbers in JSON schemas, as far as a backend's library holds them exactly.

Libraries read a schema's numbers as doubles or as integers of 64 bits. What does not fit they round or cut
off in silence, and then write values outside the bounds. Here such numbers are brought inside, to where every
value that is written still satisfies the schema, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import ROUND_FLOOR, Decimal
from typing import Any, NamedTuple

from headrace_core.grammar import Refusal
from headrace_engine.structured.schema import Schema, numbers_in, rewritten, subschemas

MAX_DOUBLE_INT = 2**53
"""Doubles hold every integer up to here."""
MAX_INT64 = 2**63 - 1
MAX_NARROW = 9 * 10**17
"""Largest distance from zero of a bound that excludes zero, in llguidance's ranges."""
MAX_WIDE = 10**18
"""Largest bound of its ranges of numbers that need not be integers."""
MAX_DIGITS = 15
MAX_EXPONENT = 22
"""Largest power of ten by which so many digits may be multiplied in a decimal number that it reads as the
nearest double. Other numbers may become a neighbouring double."""
UPPER = ("maximum", "exclusiveMaximum")
LOWER = ("minimum", "exclusiveMinimum")


class HeldNumbers(NamedTuple):
    """The numbers that a library reads from JSON and writes as they are."""

    integers: int
    """Largest, and -1 times the smallest, integer."""
    digits: int = 17
    """Most significant digits of other numbers; 17 = all doubles."""

    def holds(self, number: float) -> bool:
        """True if a number is one of them."""
        if isinstance(number, int):
            return abs(number) <= self.integers
        if self.digits >= 17:
            return True
        digits, exponent = _decimal(number)
        return len(digits) <= self.digits and abs(exponent) <= MAX_EXPONENT

    @property
    def described(self) -> str:
        """The accepted numbers, in words for a client."""
        some = f" and others of at most {self.digits} digits" if self.digits < 17 else ""
        return f"integers in -{self.integers}..{self.integers}{some}"


def inexact_values(schema: Any, held: HeldNumbers) -> Iterator[Refusal]:
    """Numbers in ``const`` and ``enum`` that a library would write as others.

    Args:
        schema: parsed, well-formed.
        held: by the library.
    """
    for pointer, found in subschemas(schema):
        if not isinstance(found, Mapping):
            continue
        for keyword in ("const", "enum"):
            numbers = numbers_in(found.get(keyword))
            beyond = next((number for number in numbers if not held.holds(number)), None)
            if beyond is not None:
                reason = f"{beyond!r:.80}: its numbers must be {held.described}"
                yield Refusal.of(keyword, pointer, reason)


def narrow_bounds(schema: Any) -> Iterator[Refusal]:
    """Bounds too far from zero for llguidance, on the side that excludes zero."""
    for pointer, found in subschemas(schema):
        if isinstance(found, Mapping):
            for keyword, sign in [*((k, 1) for k in LOWER), *((k, -1) for k in UPPER)]:
                if sign * found.get(keyword, 0) > MAX_NARROW:
                    side = "at most" if sign > 0 else "at least"
                    reason = f"{found[keyword]!r:.80}: must be {side} {sign * MAX_NARROW}"
                    yield Refusal.of(keyword, pointer, reason)


def with_exact_bounds(schema: Any) -> Any:
    """The schema with bounds that llguidance holds exactly.

    One that it would round becomes the next inside that it does not; one that is farther out than its ranges
    go becomes their end. So some values that the schema allows are never written, and none that it does not
    allow.

    Args:
        schema: nothing of it is refused by :func:`narrow_bounds`.
    """
    return rewritten(schema, _exact)


def _exact(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.keys().isdisjoint((*UPPER, *LOWER)):
        return schema
    exact = dict(schema)
    for (inclusive, exclusive), sign in ((UPPER, 1), (LOWER, -1)):
        if _only_integers(schema):
            # Whole numbers need no exclusive bound, which the library rounds.
            bounds = [math.floor(sign * exact[inclusive])] if inclusive in exact else []
            if exclusive in exact:
                bounds.append(math.ceil(sign * exact.pop(exclusive)) - 1)
            if bounds:
                exact[inclusive] = sign * _integer_up_to(min(bounds), is_upper=sign > 0)
            continue
        for keyword in (inclusive, exclusive):
            if keyword in exact:
                exact[keyword] = sign * _number_up_to(sign * exact[keyword])
    return exact


def _only_integers(schema: Schema) -> bool:
    types = schema.get("type", "number")
    return types == "integer" or (isinstance(types, list) and "number" not in types)


def _integer_up_to(bound: int, *, is_upper: bool) -> int:
    """The largest integer up to a bound that the library holds; of a lower bound, both negated."""
    if bound >= MAX_INT64 and is_upper:
        return MAX_INT64  # the library reads one more, and cuts that off
    nearest = float(min(bound, MAX_INT64 - 1024))
    return int(nearest if nearest <= bound else math.nextafter(nearest, -math.inf))


def _number_up_to(bound: float) -> float:
    """The largest number up to a bound that the library reads without rounding."""
    if bound == int(bound) and abs(bound) <= MAX_DOUBLE_INT:
        return int(bound)
    bound = min(bound, MAX_WIDE)
    digits, exponent = _decimal(bound)
    excess = max(len(digits) - MAX_DIGITS, -MAX_EXPONENT - exponent, 0)
    place = Decimal((0, (1,), exponent + excess))
    rounded = Decimal(repr(bound)).quantize(place, ROUND_FLOOR)
    return float(rounded) if exponent + excess < 0 else int(rounded)


def _decimal(number: float) -> tuple[tuple[int, ...], int]:
    """Significant digits of the shortest decimal number that is read as this double, and the power of ten
    of the last."""
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int), "numbers of schemas are finite"
    return digits, exponent
