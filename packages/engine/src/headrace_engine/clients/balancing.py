"""Which of several engines gets a request: the one with the least to do, unless another one has the
beginning of the prompt in its cache.

Both are estimates from what the front end has sent and received; no engine is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from headrace_core.request import CoreRequest

CHUNK = 32
"""Tokens of a prompt that are looked up together. Prompts that are shorter are not followed."""
MAX_CHUNKS = 1 << 17
"""Chunks that are remembered: 4 million tokens. The oldest are forgotten first."""


def prefix_keys(request: CoreRequest) -> list[int]:
    """A key for each whole chunk of a prompt, which stands for the chunk and all before it.

    Equal keys of different prefixes only cost a wrong guess. Prompts under different salts or adapters
    share no blocks, and so no keys.
    """
    tokens, lora = request.prompt_token_ids, request.lora_request
    key = hash((request.cache_salt, None if lora is None else lora.lora_int_id,
                *(item.content_hash for item in request.media)))  # fmt: skip
    keys = []
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        key = hash((key, *tokens[end - CHUNK : end]))
        keys.append(key)
    return keys


class PrefixIndex:
    """Prefixes of prompts, and the engines that were given them.

    Args:
        capacity: chunks that are remembered.
    """

    def __init__(self, capacity: int = MAX_CHUNKS) -> None:
        self._capacity = capacity
        self._engines: OrderedDict[int, int] = OrderedDict()
        """Key -> a bit for each engine."""

    def matched(self, keys: Sequence[int], num_engines: int) -> list[int]:
        """Tokens of a prompt's beginning that each engine was given before."""
        found = [0] * num_engines
        alive = (1 << num_engines) - 1
        for count, key in enumerate(keys, 1):
            alive &= self._engines.get(key, 0)
            if not alive:
                break
            for engine in range(num_engines):
                if alive >> engine & 1:
                    found[engine] = count * CHUNK
        return found

    def add(self, keys: Sequence[int], engine: int) -> None:
        """Note that an engine computes a prompt."""
        engines = self._engines
        # A prefix is forgotten after what begins with it, so that no chunk stands there in vain.
        for key in reversed(keys):
            engines[key] = engines.get(key, 0) | 1 << engine
            engines.move_to_end(key)
        while len(engines) > self._capacity:
            engines.popitem(last=False)

    def forget(self, engine: int) -> None:
        """An engine's cache is gone."""
        for key, bits in list(self._engines.items()):
            if not bits & ~(1 << engine):
                del self._engines[key]
            else:
                self._engines[key] = bits & ~(1 << engine)

    def clear(self) -> None:
        """All caches are empty."""
        self._engines.clear()


class LoadBalancer:
    """Tokens under way in each engine, and the choice of one. Belongs to one thread at a time.

    Args:
        num_engines: numbered from 0.
        follows_prefixes: engines keep the blocks of prompts that have ended.
    """

    def __init__(self, num_engines: int, *, follows_prefixes: bool = True) -> None:
        self.loads = [0] * num_engines
        """Tokens of prompts that wait or run, and of their outputs so far, by engine."""
        self._turns = [0] * num_engines
        self._num_turns = 0
        self._index = PrefixIndex() if follows_prefixes else None

    def choose(self, request: CoreRequest, engines: Collection[int]) -> int:
        """The engine that gets a request; its tokens count as that engine's load from now on.

        It is the one whose load is least after what it need not compute is taken off. So an engine that
        has a prefix is preferred as long as it has at most as many tokens more to do than the least
        busy one as the prefix has. Of equals, the one that was not chosen for longest.

        Args:
            engines: those that may be chosen; at least one.
        """
        keys = [] if self._index is None else prefix_keys(request)
        matched = [0] * len(self.loads)
        if self._index is not None:
            matched = self._index.matched(keys, len(self.loads))
        chosen = min(
            engines,
            key=lambda engine: (self.loads[engine] - matched[engine], self._turns[engine]),
        )
        self._num_turns += 1
        self._turns[chosen] = self._num_turns
        if self._index is not None:
            self._index.add(keys, chosen)
        self.loads[chosen] += len(request.prompt_token_ids)
        return chosen

    def add_tokens(self, engine: int, count: int) -> None:
        """Requests of an engine have more tokens, or (a negative number) fewer."""
        self.loads[engine] += count

    def resize(self, num_engines: int) -> None:
        """Engines have come, or those with the highest numbers have gone, with their loads and caches."""
        for engine in range(num_engines, len(self.loads)):
            self.forget(engine)
        more = [0] * (num_engines - len(self.loads))
        self.loads = self.loads[:num_engines] + more
        self._turns = self._turns[:num_engines] + more

    def forget(self, engine: int) -> None:
        """An engine has ended, with its load and its cache."""
        self.loads[engine] = 0
        if self._index is not None:
            self._index.forget(engine)

    def forget_prefixes(self) -> None:
        """All caches are empty."""
        if self._index is not None:
            self._index.clear()
