"""A pooling model behind the synchronous engine: what is fed, what comes back, and who fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pooling_stub import HIDDEN, Made, Tokens, make
from torch import Tensor

from headrace_core.errors import (
    GenerateError,
    PromptTooLong,
    RequestError,
    UnsupportedFeature,
)
from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_core.pooling import LateInteraction, PoolingParams
from headrace_core.sampling.params import SamplingParams
from headrace_engine.offline import OfflineEngine
from headrace_engine.pooling.vectors import as_array

LENGTHS = (3, 50, 20, 1, 60, 7, 33)
TEXTS = ["".join(chr(97 + (i * 7 + j * 3) % 26) for j in range(n)) for i, n in enumerate(LENGTHS)]


@contextmanager
def engine(made: Made) -> Iterator[OfflineEngine]:
    with made.offline() as engine:
        yield engine


def tensor(output: PoolingRequestOutput[PoolingOutput]) -> Tensor:
    return torch.from_numpy(as_array(output.outputs.data).copy())


def ids(text: str) -> list[int]:
    return Tokens().encode(text)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("task", ["embed", "token_embed", "classify", "score", "token_classify"])
def test_a_batch_is_what_each_prompt_is_alone(causal: bool, task: str) -> None:
    made = make(causal=causal)
    with engine(made) as llm:
        outputs = llm.encode(TEXTS, PoolingParams(), task=task)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt_token_ids == ids(text)
        torch.testing.assert_close(tensor(output), made.model.dense(ids(text), task=task))
        rows = len(ids(text)) if task.startswith("token_") else None
        assert tensor(output).shape[:-1] == (() if rows is None else (rows,))


def test_no_row_is_padding(caplog: pytest.LogCaptureFixture) -> None:
    made = make(causal=False, max_num_batched_tokens=300, max_model_len=250)
    with engine(made) as llm:
        llm.encode([[5] * 3, [6] * 50, [7] * 200], PoolingParams(), task="embed")
    assert sum(made.model.steps) == 253


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_prompt_in_chunks_is_what_it_is_whole(task: str) -> None:
    made = make(causal=True, max_num_batched_tokens=16, max_num_seqs=4)
    with engine(made) as llm:
        outputs = llm.encode(TEXTS, PoolingParams(), task=task)
    assert max(made.model.steps) <= 16
    assert sum(made.model.pooler.batches) == len(TEXTS)  # once for each, when it is complete
    for text, output in zip(TEXTS, outputs, strict=True):
        torch.testing.assert_close(tensor(output), made.model.dense(ids(text), task=task))


@pytest.mark.parametrize("pooling_type", ["CLS", "MEAN", "LAST"])
def test_rows_of_earlier_chunks_are_kept(pooling_type: str) -> None:
    made = make(
        causal=True, max_num_batched_tokens=8, max_num_seqs=4, info={"pooling_type": pooling_type}
    )
    with engine(made) as llm:
        outputs = llm.encode(TEXTS, PoolingParams(), task="embed")
    for text, output in zip(TEXTS, outputs, strict=True):
        if pooling_type != "CLS":
            torch.testing.assert_close(tensor(output), made.model.dense(ids(text)))
        else:
            first = made.model.dense(ids(text), task="token_embed")[0]
            torch.testing.assert_close(tensor(output), first)


def test_a_cached_beginning_gives_the_cold_result() -> None:
    made = make(causal=True)
    prefix = list(range(20, 52))
    with engine(made) as llm:
        (cold,) = llm.encode([[*prefix, 90, 91]], PoolingParams(), task="embed")
        (warm,) = llm.encode([[*prefix, 92, 93]], PoolingParams(), task="embed")
        (rows,) = llm.encode([[*prefix, 94]], PoolingParams(), task="token_embed")
        (again,) = llm.encode([[*prefix, 94]], PoolingParams(), task="embed")
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    torch.testing.assert_close(tensor(warm), made.model.dense([*prefix, 92, 93]))
    assert (rows.num_cached_tokens, len(tensor(rows))) == (0, 33)
    assert again.num_cached_tokens == 32


def test_results_of_all_tokens_read_no_cached_beginning() -> None:
    made = make(causal=True, info={"pooling_type": "MEAN"})
    prompt = list(range(20, 52))
    with engine(made) as llm:
        for _ in range(2):
            (output,) = llm.encode(
                [prompt], PoolingParams(skip_reading_prefix_cache=False), task="embed"
            )
            assert output.num_cached_tokens == 0
            torch.testing.assert_close(tensor(output), made.model.dense(prompt))


def test_a_preempted_prompt_is_pooled_once_and_right() -> None:
    """Two prompts of seven blocks each share eight blocks, in chunks of one."""
    made = make(
        causal=True,
        num_blocks=8,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        prefix_caching=False,
        scheduler={"max_num_partial_prefills": 2, "max_long_partial_prefills": 2,
                   "long_prefill_token_threshold": 8},
    )  # fmt: skip
    prompts = [[20 + i for i in range(56)], [80 - i for i in range(56)]]
    with engine(made) as llm:
        outputs = llm.encode(prompts, PoolingParams(), task="token_embed")
        assert llm.stats().num_preemptions > 0
    assert made.model.pooler.batches == [1, 1]
    for prompt, output in zip(prompts, outputs, strict=True):
        torch.testing.assert_close(tensor(output), made.model.dense(prompt, task="token_embed"))


def test_segments_reach_the_model() -> None:
    made = make(info={"token_types": True})
    prompt: Any = {"prompt_token_ids": [1, 40, 2, 50, 51, 2], "token_type_ids": [0, 0, 0, 1, 1, 1]}
    with engine(made) as llm:
        outputs = llm.encode(["plain", prompt, "text"], PoolingParams(), task="embed")
    dense = made.model.dense
    torch.testing.assert_close(tensor(outputs[0]), dense(ids("plain")))
    want = dense(prompt["prompt_token_ids"], prompt["token_type_ids"])
    torch.testing.assert_close(tensor(outputs[1]), want)
    torch.testing.assert_close(tensor(outputs[2]), dense(ids("text")))


def test_one_prompt_that_fails_fails_alone() -> None:
    made = make(poison=77)
    with engine(made) as llm:
        with pytest.raises(GenerateError, match="not finite"):
            llm.encode(["good", [5, 77, 6]], PoolingParams(), task="embed")
        assert not llm.has_unfinished_requests()
        (good,) = llm.encode(["good"], PoolingParams(), task="embed")
        torch.testing.assert_close(tensor(good), made.model.dense(ids("good")))
        for request_id, prompt in (("a", "good"), ("b", [5, 77, 6]), ("c", "well")):
            llm.add_request(request_id, prompt, PoolingParams(task="embed"))
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
    assert sorted(output.request_id for output in outputs) == ["a", "c"]


def test_a_pooler_that_raises_for_one_prompt_fails_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make()
    one = made.model.pooler.one

    def strict(rows: Tensor, params: PoolingParams, token_ids: list[int]) -> Tensor:
        assert 77 not in token_ids, "a poisoned prompt"
        return one(rows, params, token_ids)

    with engine(made) as llm:
        monkeypatch.setattr(made.model.pooler, "one", strict)
        for request_id, prompt in (("a", "good"), ("b", [5, 77, 6]), ("c", "well")):
            llm.add_request(request_id, prompt, PoolingParams(task="embed"))
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
    assert sorted(output.request_id for output in outputs) == ["a", "c"]


def test_parameters_are_the_prompts_own() -> None:
    made = make()
    params = [PoolingParams(dimensions=3), PoolingParams(normalize=False), PoolingParams()]
    with engine(made) as llm:
        outputs = llm.encode(["one", "two", "three"], params, task="embed")
        with pytest.raises(RequestError, match="2 values for 3 prompts"):
            llm.encode(["one", "two", "three"], params[:2], task="embed")
        with pytest.raises(RequestError, match=r"use_activation.*must be left out"):
            llm.encode(["one"], PoolingParams(use_activation=True), task="embed")
        with pytest.raises(RequestError, match=f"at most {HIDDEN}"):
            llm.encode(["one"], PoolingParams(dimensions=HIDDEN + 1), task="embed")
    assert params[0] == PoolingParams(dimensions=3)  # not changed
    assert [len(tensor(output)) for output in outputs] == [3, HIDDEN, HIDDEN]
    torch.testing.assert_close(tensor(outputs[1]), made.model.dense(ids("two"), normalize=False))


def test_truncation_keeps_the_end_and_what_stands_around_the_text() -> None:
    made = make(max_model_len=10)
    with engine(made) as llm:
        keep = PoolingParams(truncate_prompt_tokens=5)
        text, tokens = llm.encode(["abcdefghijkl", list(range(30, 50))], keep, task="embed")
        assert text.prompt_token_ids == [1, *map(ord, "jkl"), 2]
        assert tokens.prompt_token_ids == [45, 46, 47, 48, 49]
        whole = PoolingParams(truncate_prompt_tokens=-1)
        (most,) = llm.encode(["abcdefghijkl"], whole, task="embed")
        assert most.prompt_token_ids == [1, *map(ord, "efghijkl"), 2]
        with pytest.raises(
            PromptTooLong, match=r"length is 10 tokens. However, you requested 14 tokens"
        ):
            llm.encode(["abcdefghijkl"], PoolingParams(), task="embed")
        (exact,) = llm.encode(["abcdefgh"], PoolingParams(), task="embed")
        assert len(exact.prompt_token_ids) == 10
        with pytest.raises(RequestError, match="at most max_model_len = 10"):
            llm.encode(["a"], PoolingParams(truncate_prompt_tokens=11), task="embed")
        with pytest.raises(RequestError, match="at least one token"):
            llm.encode([[]], PoolingParams(), task="embed")


def test_truncation_can_keep_the_beginning() -> None:
    """The text's own beginning, the prompt before it included, and what stands around it."""
    said = {"prompts": {"query": "q: "}, "include_prompt": False, "pooling_type": "MEAN"}
    with engine(made := make(max_model_len=10, info=said)) as llm:
        keep = PoolingParams(truncate_prompt_tokens=5, truncation_side="right")
        text, tokens = llm.encode(["abcdefghijkl", list(range(30, 50))], keep, task="embed")
        assert text.prompt_token_ids == [1, *map(ord, "abc"), 2]
        assert tokens.prompt_token_ids == [30, 31, 32, 33, 34]
        named = PoolingParams(
            truncate_prompt_tokens=-1, truncation_side="right", prompt_name="query"
        )
        (output,) = llm.encode(["abcdefghijkl"], named, task="embed")
        assert output.prompt_token_ids == ids("q: abcde")
        torch.testing.assert_close(
            tensor(output), made.model.dense(ids("q: abcde"), num_left_out=4)
        )
    with pytest.raises(RequestError, match="truncation_side = 'both': must be 'left' or 'right'"):
        PoolingParams(truncation_side="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_named_prompts_come_before_texts(task: str) -> None:
    prompts = {"query": "q: ", "title": "t: "}
    made = make(info={"prompts": prompts, "default_prompt_name": "title"})
    with engine(made) as llm:
        asked = PoolingParams(prompt_name="query")
        for given in ("ab", {"prompt": "ab"}):
            (named,) = llm.encode([given], asked, task=task)
            assert named.prompt_token_ids == ids("q: ab")
            (default,) = llm.encode([given], PoolingParams(), task=task)
            assert default.prompt_token_ids == ids("t: ab")
        (tokens,) = llm.encode([[5, 6]], PoolingParams(), task=task)
        assert tokens.prompt_token_ids == [5, 6], "who sends tokens has written all of the prompt"
        with pytest.raises(RequestError, match="unless the input is text"):
            llm.encode([[5, 6]], asked, task=task)
        with pytest.raises(RequestError, match=r"must be one of \['query', 'title'\]"):
            llm.encode(["ab"], PoolingParams(prompt_name="passage"), task=task)


def test_a_default_prompt_is_not_for_classes() -> None:
    made = make(info={"prompts": {"title": "t: "}, "default_prompt_name": "title"})
    with engine(made) as llm:
        (output,) = llm.encode(["ab"], PoolingParams(), task="classify")
    assert output.prompt_token_ids == ids("ab")


def test_what_a_pooling_model_cannot_do_is_said() -> None:
    made = make(info={"tasks": ("embed",)}, served={"unmet": {"score": ("it has 2 labels",)}})
    with engine(made) as llm:
        with pytest.raises(UnsupportedFeature, match=r"runner pooling.*--runner generate") as error:
            llm.run(["text"], SamplingParams())
        assert isinstance(error.value, ValueError)
        with pytest.raises(UnsupportedFeature, match=r"its tasks are embed.*--convert classify"):
            llm.encode(["text"], PoolingParams(), task="classify")
        with pytest.raises(UnsupportedFeature, match="it has 2 labels"):
            llm.encode(["text"], PoolingParams(), task="score")
        with pytest.raises(RequestError, match=r"task = 'classify'.*'embed'"):
            llm.encode(["text"], PoolingParams(task="classify"), task="embed")


LONG = {"enable_chunked_processing": True, "native_len": 16, "max_embed_len": 1000}


@pytest.mark.parametrize("normalize", [True, False])
def test_a_long_text_is_the_weighted_mean_of_its_windows(
    normalize: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = make(max_model_len=16, info=LONG)
    long = [20 + i % 90 for i in range(75)]
    params = PoolingParams(normalize=normalize)
    with engine(made) as llm:
        short, output, other = llm.encode([[5, 6], long, [7]], params, task="embed")
    windows = [long[i : i + 16] for i in range(0, 75, 16)]
    raw = [made.model.dense(window, normalize=False).double() * len(window) for window in windows]
    want = torch.stack(raw).sum(0) / 75
    if normalize:
        want = want / want.norm()
    torch.testing.assert_close(tensor(output), want.float())
    assert output.prompt_token_ids == long
    for given, found in (([5, 6], short), ([7], other)):
        torch.testing.assert_close(tensor(found), made.model.dense(given, normalize=normalize))
    assert "a text of 75 tokens exceeds the model's 16" in caplog.text
    assert "5 windows of at most 16 tokens" in caplog.text


def test_which_lengths_are_windows() -> None:
    made = make(max_model_len=16, info=LONG)
    with engine(made) as llm:
        (exact,) = llm.encode([[30] * 16], PoolingParams(), task="embed")
        torch.testing.assert_close(tensor(exact), made.model.dense([30] * 16))
        assert made.model.steps == [16]
        with pytest.raises(PromptTooLong, match="maximum embedding input length is 1000"):
            llm.encode([[30] * 1001], PoolingParams(), task="embed")
        with pytest.raises(PromptTooLong, match=r"length is 16 tokens"):
            llm.encode([[30] * 17], PoolingParams(), task="token_embed")


def test_many_prompts_are_fed_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_engine.stepping.AT_ONCE", 3)
    made = make()
    seen: list[int] = []
    prompts = [[20 + i] for i in range(20)]
    with engine(made) as llm:
        outputs = llm.encode(
            prompts, PoolingParams(), task="embed", on_output=lambda index, _: seen.append(index)
        )
    assert max(made.model.steps) <= 3
    assert sorted(seen) == list(range(20))
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_pairs_by_cosine() -> None:
    made = make()
    with engine(made) as llm:
        scores = llm.score(["abc"], ["abc", "xyz", {"prompt_token_ids": [5, 6]}], PoolingParams())
        with pytest.raises(RequestError, match=r"use_activation = False: .*cosine of two"):
            llm.score(["abc"], ["abc"], PoolingParams(use_activation=False))
        for first, second, side in (("x" * 9999, "x", "text_1"), ("x", "x" * 9999, "text_2")):
            with pytest.raises(RequestError, match="context length") as caught:
                llm.score([first], [second], PoolingParams())
            assert caught.value.param == side
        with pytest.raises(RequestError, match=r"^text_2: must hold at least one token"):
            llm.score(["abc"], [{"prompt_token_ids": []}], PoolingParams())
    vectors = [made.model.dense(p) for p in (ids("abc"), ids("xyz"), [5, 6])]
    want = [float(torch.dot(vectors[0], v)) for v in vectors]
    np.testing.assert_allclose([s.outputs.score for s in scores], want, rtol=1e-5)
    assert sum(made.model.pooler.batches) == 3  # "abc" was embedded once
    assert scores[1].prompt_token_ids == ids("abc") + ids("xyz")


def test_a_prompt_is_read_and_left_out() -> None:
    """With the special token before it, as Sentence Transformers does."""
    said = {"prompts": {"query": "q: "}, "include_prompt": False, "pooling_type": "MEAN"}
    made, query = make(info=said), PoolingParams(prompt_name="query")
    cases: list[tuple[Any, PoolingParams, list[int], int]] = [
        ("ab", query, ids("q: ab"), 4),
        ({"prompt": "ab"}, query, ids("q: ab"), 4),
        ("", query, ids("q: "), 4),
        ("ab", PoolingParams(), ids("ab"), 0),
        (ids("abc"), PoolingParams(num_left_out=2), ids("abc"), 2),
        (ids("abc"), PoolingParams(num_left_out=9), ids("abc"), 4),
        ("abcd", dataclasses.replace(query, truncate_prompt_tokens=6), ids("abcd"), 1),
        ("abcd", dataclasses.replace(query, truncate_prompt_tokens=5), ids("bcd"), 0),
    ]
    with engine(made) as llm:
        for prompt, params, tokens, left_out in cases:
            (output,) = llm.encode([prompt], params, task="embed")
            assert output.prompt_token_ids == tokens
            torch.testing.assert_close(
                tensor(output), made.model.dense(tokens, num_left_out=left_out)
            )
        with pytest.raises(RequestError, match="num_left_out = -1: must be at least 0"):
            llm.encode(["ab"], PoolingParams(num_left_out=-1), task="embed")
        with pytest.raises(RequestError, match="num_left_out: must be left out for task"):
            llm.encode(["ab"], PoolingParams(num_left_out=1), task="token_embed")
    made = make(info={**said, "include_prompt": True})
    with engine(made) as llm:
        (output,) = llm.encode(["ab"], query, task="embed")
    torch.testing.assert_close(tensor(output), made.model.dense(ids("q: ab")))


def test_windows_of_a_text_leave_its_prompt_out() -> None:
    prompt = "q" * 18
    said = {"prompts": {"query": prompt}, "include_prompt": False, "pooling_type": "MEAN",
            "enable_chunked_processing": True, "native_len": 16, "max_embed_len": 1000}  # fmt: skip
    made = make(info=said)
    with engine(made) as llm:
        (output,) = llm.encode(["ab" * 9], PoolingParams(prompt_name="query"), task="embed")
    tokens = ids(prompt + "ab" * 9)
    windows = [tokens[16:32], tokens[32:]]
    parts = [
        made.model.dense(windows[0], num_left_out=3, normalize=False) * 13,
        made.model.dense(windows[1], normalize=False) * len(windows[1]),
    ]
    expected = torch.nn.functional.normalize(sum(parts), dim=0)  # type: ignore[arg-type]
    torch.testing.assert_close(tensor(output), expected)


def test_pairs_in_one_prompt() -> None:
    made = make(info={"scoring": "cross", "token_types": True})
    with engine(made) as llm:
        scores = llm.score(["ab", "cd"], ["xy", "z"], PoolingParams())
        (raw,) = llm.score(["ab"], ["xy"], PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="must be text"):
            llm.score([{"prompt_token_ids": [5]}], ["xy"], PoolingParams())
    for (a, b), score in zip((("ab", "xy"), ("cd", "z")), scores, strict=True):
        pair = Tokens().encode_pair(a, b)
        want = made.model.dense(pair.token_ids, pair.token_type_ids, task="score")
        np.testing.assert_allclose(score.outputs.score, float(want), rtol=1e-5)
        assert score.prompt_token_ids == pair.token_ids
    np.testing.assert_allclose(scores[0].outputs.score, 1 / (1 + np.exp(-raw.outputs.score)), 1e-5)


def test_pairs_without_special_tokens() -> None:
    with engine(make()) as llm:
        (score,) = llm.score(["ab"], ["c"], PoolingParams(), add_special_tokens=False)
        assert score.prompt_token_ids == Tokens().encode("ab", add_special_tokens=False) + (
            Tokens().encode("c", add_special_tokens=False)
        )
    for info in ({"scoring": "cross"},
                 {"scoring": "late_interaction", "late_interaction": LateInteraction()}):  # fmt: skip
        with engine(make(info=info)) as llm:
            llm.score(["ab"], ["c"], PoolingParams(), add_special_tokens=True)
            with pytest.raises(UnsupportedFeature, match="add_special_tokens = False: must be"):
                llm.score(["ab"], ["c"], PoolingParams(), add_special_tokens=False)


def test_a_template_is_refused_where_texts_are_read_one_by_one() -> None:
    with engine(make()) as llm:
        with pytest.raises(UnsupportedFeature, match="chat_template: must be left out") as error:
            llm.score(["ab"], ["xy"], PoolingParams(), chat_template="{{ messages[0].content }}")
        assert error.value.param == "chat_template"


def test_pairs_by_a_template() -> None:
    template = "Q:{{ messages[0].content }} D:{{ messages[1]['content'] }}{{ messages[1].role }}"
    made = make(causal=True, info={"scoring": "cross", "score_template": template})
    with engine(made) as llm:
        (own,) = llm.score(["ab"], ["xy"], PoolingParams())
        (given,) = llm.score(
            ["ab"], ["xy"], PoolingParams(), chat_template="{{ messages[1].content }}"
        )
        refusing = "{{ raise_exception('no query today') }}"
        with pytest.raises(RequestError, match="no query today"):
            llm.score(["a"], ["b"], PoolingParams(), chat_template=refusing)
    assert own.prompt_token_ids == ids("Q:ab D:xydocument")
    assert given.prompt_token_ids == ids("xy")


@pytest.mark.req("SEC-23")
@pytest.mark.parametrize("template", [None, "{{ messages[0].content }} {{ messages[1].content }}"])
def test_a_salt_keeps_the_blocks_of_pairs_apart(template: str | None) -> None:
    made = make(causal=True, info={"scoring": "cross", "score_template": template})

    def cached(salt: str | None) -> int:
        query: Any = "q" * 40 if salt is None else {"prompt": "q" * 40, "cache_salt": salt}
        (score,) = llm.score([query], ["d"], PoolingParams())
        return score.num_cached_tokens

    with engine(made) as llm:
        assert [cached("one"), cached("two"), cached(None)] == [0, 0, 0]
        assert cached("one") == cached("two") == cached(None) > 0


def test_pairs_by_their_tokens() -> None:
    marks = LateInteraction(
        query_marker="Q",
        document_marker="two pieces",
        document_marker_id=ord("D"),
        query_length=8,
        document_length=6,
        skip_words=(".", "no token"),
        attend_to_expansion=True,
    )
    made = make(info={"scoring": "late_interaction", "late_interaction": marks})
    with engine(made) as llm:
        (score,) = llm.score(["ab"], ["x.yzuvw"], PoolingParams())
    query = [1, ord("Q"), *map(ord, "ab"), 2, 3, 3, 3]
    document = [1, ord("D"), *map(ord, "x.y"), 2]
    assert score.prompt_token_ids == query + document
    rows = made.model.dense(document, task="token_embed")[[0, 1, 2, 4, 5]]
    want = (made.model.dense(query, task="token_embed") @ rows.T).max(1).values.sum()
    np.testing.assert_allclose(score.outputs.score, float(want), rtol=1e-5)


def max_sim(query: Tensor, document: Tensor) -> float:
    return float((query @ document.T).max(1).values.sum())


def test_fillers_that_nothing_attends_to(caplog: pytest.LogCaptureFixture) -> None:
    """They count in the score, and share steps with texts that have none."""
    marks = LateInteraction(query_length=8, document_length=16)
    made = make(info={"scoring": "late_interaction", "late_interaction": marks})
    queries, documents = ["ab", "abcdef", "c"], ["xyz", "uvw", "x" * 10]
    with engine(made) as llm:
        scores = llm.score(queries, documents, PoolingParams())
        alone = llm.encode(["ab"], PoolingParams(), task="token_embed")
    dense = partial(made.model.dense, task="token_embed")
    for score, query, document in zip(scores, queries, documents, strict=True):
        own = ids(query)
        filled = own + [3] * (8 - len(own))
        assert score.prompt_token_ids == filled + ids(document)
        want = max_sim(dense(filled, num_keys=len(own)), dense(ids(document)))
        np.testing.assert_allclose(score.outputs.score, want, rtol=1e-5)
        if len(own) < 8:
            assert abs(want - max_sim(dense(filled), dense(ids(document)))) > 1e-3
    assert made.model.filled[-2:] == [True, False]  # a row's number goes with its request
    torch.testing.assert_close(tensor(alone[0]), dense(ids("ab")))
    assert not caplog.records


@pytest.mark.parametrize(("keep", "num_fillers"), [(6, 2), (4, 0), (3, 0)])
def test_fillers_are_cut_off_first(keep: int, num_fillers: int) -> None:
    marks = LateInteraction(query_length=8, document_length=16)
    made = make(info={"scoring": "late_interaction", "late_interaction": marks})
    with engine(made) as llm:
        params = PoolingParams(truncate_prompt_tokens=keep)
        (score,) = llm.score(["ab"], ["x"], params)
    whole = ids("ab")
    own = whole if keep >= len(whole) else [*whole[: keep - 1], whole[-1]]
    filled = own + [3] * num_fillers
    assert score.prompt_token_ids == filled + ids("x")
    dense = partial(made.model.dense, task="token_embed")
    want = max_sim(dense(filled, num_keys=len(own)), dense(ids("x")))
    np.testing.assert_allclose(score.outputs.score, want, rtol=1e-5)


def test_a_causal_model_has_no_such_fillers(caplog: pytest.LogCaptureFixture) -> None:
    marks = LateInteraction(query_length=8)
    info = {"scoring": "late_interaction", "late_interaction": marks}
    with caplog.at_level(logging.WARNING), engine(make(causal=True, info=info)) as llm:
        (score,) = llm.score(["ab"], ["x"], PoolingParams())
    assert score.prompt_token_ids == ids("ab") + ids("x")
    assert "queries are not filled up" in caplog.text


@pytest.mark.parametrize("keep", [None, -1, 7])
def test_documents_are_cut_with_their_marks_to_what_the_model_takes(keep: int | None) -> None:
    marks = LateInteraction(
        document_marker="D", document_length=100, query_length=90, expand_queries=False
    )
    made = make(max_model_len=12, info={"scoring": "late_interaction", "late_interaction": marks})
    with engine(made) as llm:
        (score,) = llm.score(["a"], ["x" * 50], PoolingParams(truncate_prompt_tokens=keep))
    room = (keep if keep and keep > 0 else 12) - 3
    assert score.prompt_token_ids[3:] == [1, ord("D"), *map(ord, "x" * room), 2]


def test_a_prompt_by_itself_is_not_for_the_io_processor() -> None:
    with engine(make()) as llm:
        with pytest.raises(UnsupportedFeature, match="by the IO processor"):
            llm.encode(["text"], PoolingParams(), task="plugin")
        with pytest.raises(UnsupportedFeature, match="by the IO processor"):
            llm.add_request("r", "text", PoolingParams(task="plugin"))


def test_half_a_character_is_no_document() -> None:
    made = make(info={"scoring": "late_interaction", "late_interaction": LateInteraction()})
    with engine(made) as llm, pytest.raises(RequestError, match="text_2: character 1 is half"):
        llm.score(["a"], ["x\ud800"], PoolingParams())


def test_a_model_that_cannot_compare_says_so() -> None:
    made = make(info={"scoring": "", "tasks": ("classify",)})
    with engine(made) as llm, pytest.raises(UnsupportedFeature, match="'score'; its tasks"):
        llm.score(["a"], ["b"], PoolingParams())


@pytest.mark.parametrize("field", ["prompt_token_ids", "cache_salt"])
def test_a_malformed_side_is_refused_by_name(field: str) -> None:
    side: Any = {"prompt": "a", field: [[1]]}
    with engine(make()) as llm, pytest.raises(RequestError, match=field):
        llm.score([side], ["b"], PoolingParams())


@pytest.mark.parametrize("scoring", ["cross", "late_interaction"])
def test_media_are_not_passed_over_in_scores(scoring: str) -> None:
    side: Any = {"prompt": "a", "multi_modal_data": {"audio": np.zeros(4, np.float32)}}
    made = make(info={"scoring": scoring, "late_interaction": LateInteraction()})
    with engine(made) as llm, pytest.raises(UnsupportedFeature, match="media"):
        llm.score([side], ["b"], PoolingParams())


def test_results_of_all_tokens_read_no_cached_prefix_whatever_is_asked() -> None:
    made, text = make(causal=True), "a prefix of several blocks of eight tokens"
    asked = PoolingParams(skip_reading_prefix_cache=False)
    with engine(made) as llm:
        llm.encode([text], PoolingParams(), task="embed")
        (output,) = llm.encode([text], asked, task="token_embed")
    assert (len(tensor(output)), output.num_cached_tokens) == (len(ids(text)), 0)


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ("embed", {"normalize": "no"}),
        ("classify", {"use_activation": 2}),
        ("token_classify", {"returned_token_ids": [0, 2]}),
        ("token_classify", {"returned_token_ids": []}),
        ("token_classify", {"returned_token_ids": [True]}),
        ("token_classify", {"step_tag_id": "x"}),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(task: str, asked: dict[str, Any]) -> None:
    made = make(info={"pooling_type": "STEP", "num_labels": 2})
    with engine(made) as llm, pytest.raises(RequestError, match=next(iter(asked))):
        llm.encode(["text"], PoolingParams(**asked), task=task)


def test_extra_keywords_reach_the_pooler_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = PoolingParams(extra_kwargs={"scale": [2, None]}), []
    theirs = make(served={"source": "plugin:theirs"})
    one = theirs.model.pooler.one

    def noting(rows: Tensor, params: PoolingParams, token_ids: list[int]) -> Tensor:
        seen.append(params.extra_kwargs)
        return one(rows, params, token_ids)

    with engine(theirs) as llm:
        monkeypatch.setattr(theirs.model.pooler, "one", noting)
        llm.encode(["text"], asked, task="embed")
    assert seen == [{"scale": [2, None]}]
    with engine(make()) as llm, pytest.raises(RequestError, match=r"extra_kwargs = .*left out"):
        llm.encode(["text"], asked, task="embed")
