"""The rules of Whisper's outputs against those of transformers, on random logits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace_core.config import LoadConfig, ModelConfig, PluginSettings
from headrace_core.errors import UnsupportedModel
from headrace_core.sampling.logits_processor import BatchUpdate, MoveDirectionality
from headrace_core.sampling.params import SamplingParams
from headrace_models.families.speech.whisper_rules import WhisperRules

VOCAB, END, START, NO_TIMESTAMPS, FIRST = 60, 20, 21, 26, 27
GENERATION = {
    "decoder_start_token_id": START, "eos_token_id": END, "no_timestamps_token_id": NO_TIMESTAMPS,
    "lang_to_id": {"<|en|>": 22, "<|de|>": 23}, "task_to_id": {"transcribe": 24, "translate": 25},
    "suppress_tokens": [3, 5, 21], "begin_suppress_tokens": [1, END],
    "max_initial_timestamp_index": 4,
}  # fmt: skip
TIMED = [START, 22, 24]
PLAIN = [*TIMED, NO_TIMESTAMPS]


def rules(folder: Path, **changes: Any) -> WhisperRules:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({**GENERATION, **changes}))
    config = SimpleNamespace(model=ModelConfig(model=str(folder)), load=LoadConfig())
    made: PluginSettings = config
    return WhisperRules(made, torch.device("cpu"), False)


def by_transformers(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    from transformers.generation import logits_process as their

    generation = SimpleNamespace(
        no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=END, bos_token_id=0,
        max_initial_timestamp_index=4,
    )  # fmt: skip
    begin = len(prompt)
    processors = [
        their.SuppressTokensAtBeginLogitsProcessor([1, END], begin_index=begin),
        their.SuppressTokensLogitsProcessor([3, 5, 21]),
    ]
    if NO_TIMESTAMPS not in prompt:
        processors.append(their.WhisperTimeStampLogitsProcessor(generation, begin_index=begin))
    ids, scores = torch.tensor([prompt + output]), logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def begin(processor: WhisperRules, *requests: tuple[list[int], list[int]]) -> None:
    added = [
        (slot, SamplingParams(), prompt, output) for slot, (prompt, output) in enumerate(requests)
    ]
    processor.update_state(BatchUpdate(len(added), (), added, ()))


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return 2 * torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed))


HISTORIES = [
    [], [FIRST], [FIRST, FIRST], [FIRST + 3, 7], [FIRST, 7, FIRST + 5], [FIRST, 7, 8, FIRST + 5],
    [FIRST, 7, FIRST + 5, FIRST + 5], [FIRST, 7, FIRST + 5, FIRST + 6, 9], [7], [7, 8],
    [FIRST, 7, FIRST + 32, FIRST + 32],
]  # fmt: skip


@pytest.mark.parametrize("prompt", [TIMED, PLAIN, [9, 8, *TIMED]], ids=["timed", "plain", "after"])
def test_equal_to_transformers(tmp_path, prompt):
    processor = rules(tmp_path)
    begin(processor, *((prompt, list(history)) for history in HISTORIES))
    for seed in range(20):
        given = logits(seed, len(HISTORIES))
        expected = [by_transformers(prompt, history, row) for history, row in zip(HISTORIES, given)]
        assert torch.equal(processor.apply(given.clone()), torch.stack(expected))


def test_the_mass_of_timestamps_decides_in_some_rows_and_not_in_others(tmp_path):
    """Otherwise the comparison above would not see that rule."""
    processor = rules(tmp_path)
    begin(processor, *((TIMED, [FIRST, 7, 8]) for _ in range(50)))
    words = processor.apply(logits(0, 50))[:, :FIRST].isfinite().any(dim=1)
    assert 0 < int(words.sum()) < 50


def test_sampled_transcripts_are_well_formed(tmp_path):
    processor, chooser = rules(tmp_path), random.Random(0)
    outputs: list[list[int]] = [[] for _ in range(8)]
    begin(processor, *((TIMED, output) for output in outputs))
    for step in range(40):
        rows = processor.apply(logits(step, 8))
        for row, output in zip(rows, outputs):
            weights = torch.softmax(row, 0).tolist()
            output.append(chooser.choices(range(VOCAB), weights)[0])
    for output in outputs:
        kept = output[: output.index(END)] if END in output else output
        times = [token for token in kept if token >= FIRST]
        assert times == sorted(times)
        assert FIRST <= kept[0] <= FIRST + 4
        assert not {1, 3, 5, 21} & {kept[0]} and not {3, 5, 21, NO_TIMESTAMPS} & set(kept)  # noqa: PT018


def test_without_a_first_limit_any_timestamp_may_come_first(tmp_path):
    processor = rules(tmp_path, max_initial_timestamp_index=None)
    begin(processor, (TIMED, []))
    assert bool(processor.apply(logits(0))[0, FIRST:].isfinite().all())


@pytest.mark.parametrize("prompt", [[START], [START, 22], [7, 8], None])
def test_a_prompt_without_a_task_gets_no_timestamps(tmp_path, prompt):
    """A probe for the language, above all: its next token is no timestamp."""
    processor = rules(tmp_path)
    begin(processor, (prompt, []))
    row = processor.apply(logits(0))[0]
    assert set((~row.isfinite()).nonzero().flatten().tolist()) == {1, 3, 5, END, 21}


def test_a_checkpoint_without_languages_needs_no_task(tmp_path):
    processor = rules(tmp_path, is_multilingual=False)
    begin(processor, ([START], []), ([START, NO_TIMESTAMPS], []))
    rows = processor.apply(logits(0, 2))
    assert not rows[0, :FIRST].isfinite().any()
    assert rows[1, :FIRST].isfinite().any()


@pytest.mark.parametrize(
    "change",
    [
        {"suppress_tokens": [3, *range(FIRST, VOCAB)]},
        {"begin_suppress_tokens": [1, END, *range(FIRST, VOCAB)]},
        {"suppress_tokens": [FIRST, FIRST + 1], "max_initial_timestamp_index": 1},
        {"no_timestamps_token_id": VOCAB + 3},  # the vocabulary ends before them
    ],
)
def test_where_no_timestamp_can_begin_a_transcript_it_is_text(tmp_path, change):
    processor = rules(tmp_path, **change)
    begin(processor, (TIMED, []), (TIMED, [7]), (PLAIN, []))
    given = logits(0)
    rows = processor.apply(given.repeat(3, 1))
    assert rows[0, :END].isfinite().any()
    assert torch.equal(rows[0], rows[2])
    assert rows[1, END].isfinite()


def test_rows_follow_their_requests(tmp_path):
    processor = rules(tmp_path)
    begin(processor, (TIMED, []), (PLAIN, [7]))
    swap = BatchUpdate(2, (), (), ((0, 1, MoveDirectionality.SWAP),))
    processor.update_state(swap)
    given = logits(0, 2)
    found = processor.apply(given.clone())
    assert torch.equal(found[1], by_transformers(TIMED, [], given[1]))
    assert torch.equal(found[0], by_transformers(PLAIN, [7], given[0]))
    processor.update_state(BatchUpdate(1, (1,), (), ()))
    assert torch.equal(processor.apply(given.clone())[1], given[1])


@pytest.mark.parametrize("change", [{"suppress_tokens": "all"}, {"begin_suppress_tokens": [1.5]},
                                    {"max_initial_timestamp_index": "x"}])  # fmt: skip
def test_wrong_lists_are_refused_by_name(tmp_path, change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        rules(tmp_path, **change)


def test_ids_from_names_and_minus_one_is_no_token(tmp_path):
    """What a checkpoint with an empty generation config, or an old one, needs."""
    names = {"<|startoftranscript|>": START, "<|endoftext|>": END, "<|notimestamps|>": NO_TIMESTAMPS,
             "<|en|>": 22, "<|transcribe|>": 24}  # fmt: skip
    (tmp_path / "added_tokens.json").write_text(json.dumps(names))
    empty = dict.fromkeys(GENERATION)
    processor = rules(tmp_path, **{**empty, "suppress_tokens": [-1]})
    begin(processor, (TIMED, [FIRST, 7]), (PLAIN, []))
    given = logits(3, 2)
    found = processor.apply(given.clone())
    assert not found[0, NO_TIMESTAMPS].isfinite()
    assert torch.equal(found[1], given[1])
