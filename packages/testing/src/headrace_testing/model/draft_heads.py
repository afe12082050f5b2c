"""Conformance suite of heads that guess by a model's hidden states. Inherit, and say how one is made::

class TestMine(DraftHeadConformance):
    vocab_size, hidden_size = 320, 64

    def make(self):
        return load_my_head()

Letters: T rows, W width of the head, Vh its vocabulary, V and H of the model.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace_core.kv import FullAttentionSpec, MLASpec
from headrace_testing.model.decoders import PagedDriver

CHUNKS = (17, 1, 5, 2)
"""Rows of a request's passes, one after the other."""


class _Passes:
    """Passes of a head over a paged cache of its own."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.driver = PagedDriver(head)

    def run(
        self,
        chunks: Mapping[str, tuple[Tensor, Sequence[int]]],
        rows: Sequence[int] | None = None,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Next states [R, W] and logits [R, Vh].

        Args:
            chunks: by request: the next rows' states [n, W], and the tokens behind them.
            rows: that are wanted; None: all.
        """
        batch = self.driver.batch({name: ids for name, (_, ids) in chunks.items()}, rows)
        states = torch.cat([states for states, _ in chunks.values()])
        with torch.inference_mode():
            out = self.head.forward(batch, states.clone(), depth)
            return out.clone(), self.head.compute_logits(out, depth).float()


class DraftHeadConformance(ABC):
    """What the engine relies on, beyond what a head guesses."""

    vocab_size: ClassVar[int]
    """V."""
    hidden_size: ClassVar[int]
    """H."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of the same rows in other passes, in float32."""

    @abstractmethod
    def make(self) -> Any:
        """A loaded :class:`headrace_engine.speculation.draft_head.DraftHead` whose layers have no cache."""

    def drawn(self, head: Any, count: int, seed: int = 0) -> tuple[Tensor, list[int]]:
        """States [count, W] as the head's own projection makes them, and as many tokens."""
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(count, self.hidden_size, generator=generator) for _ in range(9)]
        with torch.inference_mode():
            states = head.project(parts[0], parts[1 : 1 + len(head.streams)])
        ids = torch.randint(self.vocab_size, (count,), generator=generator).tolist()
        return states, ids

    def close(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=self.tolerance)

    def test_what_it_says_of_itself(self) -> None:
        head = self.make()
        assert head.width >= 1
        assert head.most is None or head.most >= 1
        assert all(isinstance(stream, int) and stream >= 0 for stream in head.streams)
        if head.token_ids is not None:
            ids = head.token_ids
            assert ids.dtype == torch.int64
            assert 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size
            assert len(ids.unique()) == len(ids)

    def test_its_layers_keep_all_that_they_saw(self) -> None:
        """They may be behind the model's, and what is behind a wrong guess is written again."""
        for name, layer in self.make().attention_layers().items():
            assert isinstance(layer.kv_spec, FullAttentionSpec | MLASpec), name
            assert layer.spec.kv_sharing_target is None, name

    def test_projected_states_are_its_own(self) -> None:
        """The next captured step writes where the model's states were."""
        head = self.make()
        hidden = torch.randn(5, self.hidden_size)
        streams = [torch.randn(5, self.hidden_size) for _ in head.streams]
        with torch.inference_mode():
            states = head.project(hidden, streams)
        assert len(states) == 5
        assert states.shape[1] == head.width or not head.attention_layers()
        kept = states.clone()
        for given in (hidden, *streams):
            given.zero_()
        assert torch.equal(states, kept)

    def test_shapes(self) -> None:
        head = self.make()
        out, logits = _Passes(head).run({"a": self.drawn(head, 6)})
        size = self.vocab_size if head.token_ids is None else len(head.token_ids)
        assert (out.shape, logits.shape) == ((6, head.width), (6, size))
        assert out.isfinite().all()
        assert logits.isfinite().all()

    def test_the_rows_that_are_wanted(self) -> None:
        head = self.make()
        given, rows = {"a": self.drawn(head, 9), "b": self.drawn(head, 4, 1)}, [3, 8, 12]
        whole, some = _Passes(head).run(given), _Passes(self.make()).run(given, rows)
        for found, expected in zip(some, whole):
            self.close(found, expected[rows])

    def test_passes_may_be_cut_anywhere_and_hold_several_requests(self) -> None:
        """As prompts come in chunks, and rows wait."""
        head = self.make()
        names = "abc"
        given = {name: self.drawn(head, sum(CHUNKS), seed) for seed, name in enumerate(names)}
        alone = {name: _Passes(self.make()).run({name: one}) for name, one in given.items()}
        passes, begin = _Passes(head), 0
        for count in CHUNKS:
            end = begin + count
            parts = {n: (states[begin:end], ids[begin:end]) for n, (states, ids) in given.items()}
            found = passes.run(parts)
            for index, name in enumerate(names):
                rows = slice(index * count, (index + 1) * count)
                for one, expected in zip(found, alone[name]):
                    self.close(one[rows], expected[begin:end])
            begin = end

    def test_states_and_tokens_both_count(self) -> None:
        """But for heads without caches, whose later states may be the model's: Medusa's know no guesses."""
        head = self.make()
        states, ids = self.drawn(head, 8)
        (_, before) = _Passes(head).run({"a": (states, ids)})
        (_, moved) = _Passes(self.make()).run({"a": (states.flip(0), ids)})
        assert (before - moved).abs().max() > 10 * self.tolerance
        if head.attention_layers():
            others = [(token + 1) % self.vocab_size for token in ids]
            (_, moved) = _Passes(self.make()).run({"a": (states, others)})
            assert (before - moved).abs().max() > 10 * self.tolerance

    def test_it_goes_on_with_its_own_states(self) -> None:
        """What is behind a wrong guess is computed again, from the model's states."""
        head = self.make()
        passes, (states, ids) = _Passes(head), self.drawn(head, 12)
        most = 4 if head.most is None else min(4, head.most)

        def guesses() -> list[Tensor]:
            found, token, out = list[Tensor](), ids[11], states[11:]
            for depth in range(most):
                out, logits = passes.run({"a": (out, [token])}, depth=depth)
                found.append(logits)
                token = int(logits[0].argmax())
                token = token if head.token_ids is None else int(head.token_ids[token])
            return found

        if head.attention_layers():
            passes.run({"a": (states[:11], ids[:11])})
        first = guesses()
        if head.attention_layers():
            passes.driver.sequences["a"].num_computed_tokens = 11
        for again, before in zip(guesses(), first, strict=True):
            self.close(again, before)

    def test_heads_with_caches_pay_no_heed_to_the_depth(self) -> None:
        """One recording serves all guesses."""
        head = self.make()
        if head.attention_layers():
            given = {"a": self.drawn(head, 5)}
            for found, expected in zip(
                _Passes(head).run(given, depth=3), _Passes(self.make()).run(given)
            ):
                self.close(found, expected)

    def test_prompts_of_which_nothing_is_wanted(self) -> None:
        head = self.make()
        batch = PagedDriver(head).batch({"a": self.drawn(head, 6)[1]}, [0])
        batch = dataclasses.replace(batch, logits_rows=torch.zeros(0, dtype=torch.int64))
        with torch.inference_mode():
            assert head.forward(batch, self.drawn(head, 6)[0], 0).shape == (0, head.width)
