"""Guesses by what was there before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import ConfigError, PluginNotFound
from headrace_core.speculation import DraftTask
from headrace_engine.speculation.config import SpeculativeConfig
from headrace_engine.speculation.matching import earlier_ends, vote
from headrace_engine.speculation.ngram import NgramProposer
from headrace_engine.speculation.suffix import EarlierOutputs, SuffixProposer
from headrace_testing.engine.draft_proposers import DraftProposerConformance

SUFFIX: dict[str, Any] = {
    "suffix_decoding_max_tree_depth": 24, "suffix_decoding_max_cached_requests": 3,
    "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1,
}  # fmt: skip


def task(ids: list[int], most: int = 8, num_prompt_tokens: int = 1) -> DraftTask:
    return DraftTask("r", np.array(ids, np.int32), num_prompt_tokens, most)


def by_hand(ids: list[int], longest: int, shortest: int) -> tuple[list[int], int]:
    for length in range(min(longest, len(ids) - 1), shortest - 1, -1):
        end = ids[len(ids) - length :]
        places = [i for i in range(length, len(ids)) if ids[i - length : i] == end]
        if places:
            return places, length
    return [], 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 3))
def test_ends_are_found_as_by_hand(ids: list[int], longest: int, shortest: int) -> None:
    places, length = by_hand(ids, longest, shortest)
    found = earlier_ends(np.array(ids, np.int32), longest, shortest)
    assert (found.places.tolist(), found.length) == (places, length)


class TestNgramConforms(DraftProposerConformance):
    def make(self) -> NgramProposer:
        return NgramProposer({"prompt_lookup_max": 3})


class TestSuffixConforms(DraftProposerConformance):
    def make(self) -> SuffixProposer:
        return SuffixProposer(SUFFIX)


class TestNgram:
    def test_the_latest_occurrence_of_the_longest_run_counts(self) -> None:
        ids = [1, 2, 3, 7, 8, 9, 5, 2, 3, 4, 4, 6, 1, 2, 3]
        longest = NgramProposer({"prompt_lookup_max": 3})
        assert list(longest.propose([task(ids, most=2)])[0]) == [7, 8]
        two = NgramProposer({"prompt_lookup_max": 2, "prompt_lookup_min": 2})
        assert list(two.propose([task(ids, most=3)])[0]) == [4, 4, 6]

    @pytest.mark.parametrize("ids", [[1], [1, 2, 3], [5, 1, 2, 1]])
    def test_shorter_runs_do_not_count(self, ids: list[int]) -> None:
        proposer = NgramProposer({"prompt_lookup_max": 4, "prompt_lookup_min": 2})
        assert list(proposer.propose([task(ids)])[0]) == []


class TestSuffix:
    def test_votes_decide(self) -> None:
        ids = np.array([1, 5, 6, 1, 5, 7, 1, 5, 6, 1], np.int32)
        guess = vote([(ids, np.array([1, 4, 7]))], 3, 0.1)
        assert guess.token_ids == [5, 6, 1]
        assert guess.score == pytest.approx(1 + 2 / 3 + 2 / 3)

    def test_an_unlikely_token_ends_the_guess(self) -> None:
        ids = np.array([1, 5, 6, 1, 5, 7, 1, 5, 6, 1], np.int32)
        assert vote([(ids, np.array([1, 4, 7]))], 3, 0.7).token_ids == [5]

    def test_the_guess_is_as_long_as_the_match(self) -> None:
        proposer = SuffixProposer(SUFFIX)
        ids = [9, 8, 7, 1, 2, 3, 4, 5, 9, 8, 7]
        assert list(proposer.propose([task(ids)])[0]) == [1, 2, 3]
        doubled = SuffixProposer({**SUFFIX, "suffix_decoding_max_spec_factor": 2.0})
        assert list(doubled.propose([task(ids, most=4)])[0]) == [1, 2, 3, 4]

    def test_earlier_outputs_are_remembered(self) -> None:
        proposer = SuffixProposer(SUFFIX)
        ids = [3, 1, 4, 2, 5, 9, 6, 8]
        assert list(proposer.propose([task([7, 1, 4, 2])])[0]) == []
        proposer.finish("other", np.array([8, *ids], np.int32), 1)
        assert list(proposer.propose([task([7, 1, 4, 2])])[0]) == [5, 9, 6]

    def test_the_oldest_output_goes_first(self) -> None:
        kept = EarlierOutputs(2)
        for number in range(3):
            kept.keep(str(number), np.arange(number * 10, number * 10 + 6, dtype=np.int32))
        assert len(kept) == 2
        for start, known in ((0, False), (10, True), (20, True)):
            sources, length = kept.ends(np.arange(start, start + 4, dtype=np.int32), 24)
            assert (bool(sources), length) == (known, 4 if known else 0)

    def test_none_are_kept(self) -> None:
        kept = EarlierOutputs(0)
        kept.keep("a", np.arange(9, dtype=np.int32))
        assert not len(kept)
        assert not kept._places

    def test_a_request_that_comes_back_is_kept_once(self) -> None:
        kept = EarlierOutputs(5)
        for end in (6, 9):
            kept.keep("a", np.arange(end, dtype=np.int32))
        assert len(kept) == 1
        assert sum(map(len, kept._places.values())) == 6


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"method": "ngram"}, "num_speculative_tokens = None: must be a number with method = 'ngram'$"),
            ({"method": "ngrams"}, "method = 'ngrams', a plug-in's; built in are ngram, suffix, "),
            ({"method": "ngram", "num_speculative_tokens": 3}, "prompt_lookup_max = None"),
            ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
              "prompt_lookup_min": 3}, "prompt_lookup_min = 3: must be in 1..prompt_lookup_max = 2"),
            ({"method": "suffix", "num_speculative_tokens": 0}, "num_speculative_tokens = 0"),
            ({"method": "suffix", "suffix_decoding_min_token_prob": 2.0}, "min_token_prob = 2.0"),
            ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "max_tree_depth = 0"),
            ({"method": "suffix", "disable_by_batch_size": 0}, "disable_by_batch_size = 0"),
            ({"method": "eagle"}, "model = None: must be a checkpoint with method = .*'eagle3'"),
            ({"method": "mtp", "model": "a"}, "model = 'a': must be .* left out with others"),
            ({"method": "draft_model", "model": "a"}, "num_speculative_tokens = None: must be"),
            ({"num_speculative_tokens": 3}, "left out without speculative_config.method"),
        ],
    )  # fmt: skip
    def test_refused(self, settings: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            SpeculativeConfig(**settings)

    def test_who_guesses(self) -> None:
        assert SpeculativeConfig().make_proposer() is None
        suffix = SpeculativeConfig(method="suffix")
        assert suffix.num_drafts == 32
        with pytest.raises(PluginNotFound, match="telepathy"):
            SpeculativeConfig(method="telepathy", num_speculative_tokens=1).make_proposer()
