from __future__ import annotations

import json

import pytest

from headrace.arguments import Parser
from headrace.bench import datasets
from headrace.bench.datasets import DatasetOptions
from headrace_core.errors import ConfigError


class Letters:
    """A tokenizer with a token for each of 26 letters and for each pair "ab": texts may come back shorter."""

    vocab_size = 30
    special_token_ids = frozenset({0})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids, at = ([0] if add_special_tokens else []), 0
        while at < len(text):
            pair = text[at : at + 2] == "ab"
            ids.append(27 if pair else 1 + (ord(text[at]) - 97) % 26)
            at += 2 if pair else 1
        return ids

    def decode(self, token_ids, **_):
        return "".join("ab" if i == 27 else chr(96 + i) if 0 < i < 27 else "z" for i in token_ids)


def _load(*words: str, **plan):
    parser = Parser()
    datasets.add_arguments(parser)
    args = parser.parse_args(list(words))
    return datasets.load(args, DatasetOptions(**{"num_prompts": args.num_prompts or 10, **plan}))


def test_random_lengths_stay_in_their_range_and_the_prefix_is_shared():
    samples = _load("--random-input-len", "100", "--random-output-len", "10", "--random-range-ratio",
                    "0.25", "--random-prefix-len", "20", "--num-prompts", "200")  # fmt: skip
    lengths = {len(s.prompt) - 20 for s in samples}
    assert min(lengths) >= 75
    assert max(lengths) <= 125
    assert len(lengths) > 20
    assert {s.num_output_tokens for s in samples} <= set(range(7, 14))
    assert len({tuple(s.prompt[:20]) for s in samples}) == 1
    assert len({tuple(s.prompt[20:]) for s in samples}) == 200
    assert all(s.num_prompt_tokens == len(s.prompt) for s in samples)


def test_the_seed_decides():
    assert _load(seed=3) == _load(seed=3)
    assert _load(seed=3) != _load(seed=4)


def test_text_has_as_many_tokens_as_asked_for():
    samples = _load("--random-input-len", "40", tokenizer=Letters())
    assert all(isinstance(s.prompt, str) for s in samples)
    assert {len(Letters().encode(s.prompt, add_special_tokens=False)) for s in samples} == {40}
    assert {s.num_prompt_tokens for s in samples} == {40}


def test_prefixes_are_repeated():
    samples = _load("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "8",
                    "--prefix-repetition-suffix-len", "4", "--prefix-repetition-num-prefixes", "3",
                    "--num-prompts", "12")  # fmt: skip
    prefixes = [tuple(s.prompt[:8]) for s in samples]
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [4, 4, 4]
    assert {len(s.prompt) for s in samples} == {12}


def test_sharegpt_takes_first_turns_of_usable_length(tmp_path):
    def talk(question, answer):
        return {
            "conversations": [
                {"from": "human", "value": question},
                {"from": "gpt", "value": answer},
            ]
        }

    file = tmp_path / "talks.json"
    file.write_text(json.dumps([talk("x" * 9, "y" * 7), talk("x", "y" * 7), talk("x" * 2000, "y" * 7),
                                talk("x" * 9, "y"), {"conversations": []}]))  # fmt: skip
    words = ("--dataset-name", "sharegpt", "--dataset-path", str(file))
    samples = _load(*words, tokenizer=Letters(), num_prompts=2)
    assert [(s.prompt, s.num_output_tokens) for s in samples] == [("x" * 9, 7)] * 2
    assert len(_load(*words, tokenizer=Letters(), oversample=False)) == 1
    assert (
        _load(*words, "--sharegpt-output-len", "5", tokenizer=Letters())[0].num_output_tokens == 5
    )


def test_custom_lines(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two"}\n')
    samples = _load(
        "--dataset-name", "custom", "--dataset-path", str(file), shuffle=False, num_prompts=3
    )
    assert [(s.prompt, s.num_output_tokens, s.num_prompt_tokens) for s in samples] == [
        ("one", 3, None), ("two", 256, None), ("one", 3, None),
    ]  # fmt: skip


def test_sonnet_shares_its_first_lines(tmp_path):
    file = tmp_path / "poem.txt"
    file.write_text("\n".join("line" + letter for letter in "abcdefghij") + "\n")
    samples = _load("--dataset-name", "sonnet", "--dataset-path", str(file), "--sonnet-input-len", "150",
                    "--sonnet-prefix-len", "90", tokenizer=Letters(), num_prompts=4)  # fmt: skip
    assert all(s.prompt.startswith(datasets.POEM + "linea\nlineb\n") for s in samples)
    assert all(abs(s.num_prompt_tokens - 150) < 10 for s in samples)
    assert len({s.prompt for s in samples}) == 4


def test_burstgpt_takes_lengths_from_a_trace(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("Timestamp,Request tokens,Response tokens\n1,5,2\n2,7,0\n3,6,3\n")
    samples = _load(
        "--dataset-name", "burstgpt", "--dataset-path", str(file), shuffle=False, num_prompts=2
    )
    assert [(len(s.prompt), s.num_output_tokens) for s in samples] == [(5, 2), (6, 3)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--random-range-ratio", "1.5"), "random-range-ratio 1.5"),
        (("--random-input-len", "0"), "--random-input-len 0"),
        (("--dataset-name", "custom"), "--dataset-path"),
        (("--dataset-name", "sonnet", "--dataset-path", "x"), "--tokenizer"),
        (("--dataset-name", "custom", "--dataset-path", "/no/such"), "/no/such"),
    ],
)
def test_what_is_missing_is_named(words, said):
    with pytest.raises(ConfigError, match=said):
        _load(*words)


def test_a_broken_line_is_named(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        _load("--dataset-name", "custom", "--dataset-path", str(file))
