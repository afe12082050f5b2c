"""How a step's requests are divided among parts that run side by side.

Guided self-scheduling (Polychronopoulos and Kuck, 1987): a part is a fixed share of what is left, so
the first ones are large, which is efficient, and the last ones small, so that threads end together.
For the same reason long requests come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEAST_TOKENS = 128
"""Of a part, where there are more: products of fewer rows wait for weights."""


def longest_first(scheduled: Mapping[str, int]) -> dict[str, int]:
    """Numbers of tokens by request, largest first."""
    return dict(sorted(scheduled.items(), key=lambda item: -item[1]))


def divide(counts: Sequence[int], lanes: int, most_tokens: int) -> list[int]:
    """Where parts of a step begin and end, as indices of its requests: 0, ..., their number.

    One part, where more would not keep all lanes busy: threads do better then to share each kernel.

    Args:
        counts: tokens by request, largest first.
        lanes: parts that run at the same time.
        most_tokens: of a part.
    """
    left, whole = sum(counts), [0, len(counts)]
    if lanes < 2 or left < 2 * lanes * LEAST_TOKENS or counts[0] > min(most_tokens, left // lanes):
        return whole
    cuts, held = [0], 0
    share = _share(left, lanes, most_tokens)
    for index, count in enumerate(counts):
        if held and held + count > share:
            cuts.append(index)
            left -= held
            held, share = 0, _share(left, lanes, most_tokens)
        held += count
    return [*cuts, len(counts)]


def _share(left: int, lanes: int, most_tokens: int) -> int:
    return min(max(LEAST_TOKENS, left // (2 * lanes)), most_tokens)
