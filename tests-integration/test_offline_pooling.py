"""``LLM``'s pooling methods: arguments of wrong kinds, several threads, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooling_checkpoints import bert, text
from side_by_side import side_by_side

from headrace import LLM, LLMEngine, PoolingParams, SamplingParams
from headrace.engine_args import EngineArgs
from headrace_core.errors import RequestError

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "block_size": 8, "kv_cache_memory_bytes": 16 << 20,
    "use_tqdm_on_load": False,
}  # fmt: skip
QUIET: dict[str, Any] = {"use_tqdm": False}
WRONG = [
    None, 3, 3.5, True, [None], [3.5], ["fine", None], [[None]], [["a"]], b"x", [b"x"], [True], {}, [{}],
    object(), np.array([0.5]), np.array(3), [1, None], {"prompt": 3}, {"x": 1}, [[]],
    {"prompt_token_ids": "ab"},
]  # fmt: skip


def opened(folder: Path, labels: int = 0, **more: Any) -> LLM:
    bert(folder, labels=labels) if labels else bert(folder)
    return LLM(str(folder), **SETTINGS, **more)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: Any) -> Iterator[LLM]:
    with opened(tmp_path_factory.mktemp("embedder"), disable_log_stats=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: Any) -> Iterator[LLM]:
    with opened(tmp_path_factory.mktemp("classifier"), 3) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: Any) -> Iterator[LLM]:
    with opened(tmp_path_factory.mktemp("reranker"), 1) as llm:
        yield llm


def nothing_runs(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)


def test_prompts_of_another_kind(embedder: LLM, classifier: LLM) -> None:
    for wrong in WRONG:
        calls: list[Callable[[], Any]] = [
            lambda w=wrong: embedder.embed(w, **QUIET),
            lambda w=wrong: embedder.encode(w, pooling_task="embed", **QUIET),
            lambda w=wrong: classifier.classify(w, **QUIET),
            lambda w=wrong: classifier.reward(w, **QUIET),
        ]  # type: ignore[misc]
        for call in calls:
            with pytest.raises(RequestError, match="prompt") as caught:
                call()
            assert caught.value.param in ("prompts", "prompt", "prompt_token_ids", "x")
    nothing_runs(embedder)
    nothing_runs(classifier)


def test_sides_of_another_kind(embedder: LLM, reranker: LLM) -> None:
    for wrong in WRONG:
        for llm in (embedder, reranker):
            for sides in ((wrong, "a"), ("a", wrong)):
                with pytest.raises(RequestError):
                    llm.score(*sides, **QUIET)
    for wrong in (None, 3, np.array(3), b"x"):
        for llm in (embedder, reranker):
            with pytest.raises(RequestError, match=r"^data_1 = .*must be text") as caught:
                llm.score(wrong, "a", **QUIET)
            assert caught.value.param == "data_1"
            with pytest.raises(RequestError, match=r"^data_2 = .*must be text"):
                llm.score("a", wrong, **QUIET)
    for wrong in (3, ["x"]):
        with pytest.raises(RequestError, match=r"^chat_template = .*must be a template's text"):
            reranker.score("a", "b", chat_template=wrong, **QUIET)
    [score] = reranker.score(np.array(["a"]), np.array(["b"]), **QUIET)
    assert score.outputs.score == reranker.score("a", "b", **QUIET)[0].outputs.score
    nothing_runs(embedder)
    nothing_runs(reranker)


@pytest.mark.parametrize(
    "given",
    [{"x": 1}, "embed", 3, [None], [{}], SamplingParams(), [PoolingParams()] * 3],
    ids=lambda given: repr(given)[:20],
)
def test_parameters_of_another_kind(
    embedder: LLM, classifier: LLM, reranker: LLM, given: Any
) -> None:
    for call in (
        lambda: embedder.embed("a", pooling_params=given, **QUIET),
        lambda: embedder.encode("a", given, pooling_task="embed", **QUIET),
        lambda: classifier.classify("a", pooling_params=given, **QUIET),
        lambda: classifier.reward("a", pooling_params=given, **QUIET),
        lambda: reranker.score("a", "b", pooling_params=given, **QUIET),
    ):
        with pytest.raises(RequestError, match=r"^pooling_params") as caught:
            call()
        assert caught.value.param == "pooling_params"
    with pytest.raises(RequestError, match=r"^pooling_params = \{'x': 1\}"):
        embedder.encode("a", {"x": 1}, **QUIET)  # type: ignore[arg-type]


def test_options_of_another_kind(embedder: LLM) -> None:
    for wrong in ("x", 3.5, True, -2, 0, 10**9):
        with pytest.raises(RequestError, match=r"^truncate_prompt_tokens = "):
            embedder.embed("a b c d", truncate_prompt_tokens=wrong, **QUIET)
    for wrong in (3, ["q"], "nope"):
        with pytest.raises(RequestError, match=r"^prompt_name = "):
            embedder.embed("a", prompt_name=wrong, **QUIET)
    for wrong in (3, ["embed"], {"a": 1}, "dance"):
        with pytest.raises(RequestError, match=r"^pooling_task = .*must be one of embed"):
            embedder.encode("a", pooling_task=wrong, **QUIET)
    for call in (embedder.enqueue, embedder.generate):
        with pytest.raises(ValueError, match=r"runner pooling"):
            call("a")
    assert embedder.get_supported_tasks() == embedder.engine.model.tasks
    assert "embed" in embedder.get_supported_tasks()


def test_calls_of_several_threads_get_their_own_results(embedder: LLM, reranker: LLM) -> None:
    work = [[text(3 + 5 * i + j, 7 * i + j) for j in range(1 + i)] for i in range(6)]
    alone = [embedder.embed(texts, **QUIET) for texts in work]
    params = PoolingParams(normalize=False)
    plain = [embedder.encode(texts, params, pooling_task="embed", **QUIET) for texts in work]
    scores = [reranker.score(texts[0], texts, **QUIET) for texts in work]
    for _ in range(3):
        embedded, encoded, scored = (
            [lambda w=w: embedder.embed(w, **QUIET) for w in work],
            [lambda w=w: embedder.encode(w, params, pooling_task="embed", **QUIET) for w in work],
            [lambda w=w: reranker.score(w[0], w, **QUIET) for w in work],
        )  # type: ignore[misc]
        found = side_by_side([*embedded, *encoded, *scored])
        for wanted, got in zip(alone, found[:6], strict=True):
            assert [o.prompt_token_ids for o in got] == [o.prompt_token_ids for o in wanted]
            torch.testing.assert_close(
                torch.tensor([o.outputs.embedding for o in got]),
                torch.tensor([o.outputs.embedding for o in wanted]),
            )
        for wanted, got in zip(plain, found[6:12], strict=True):
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine.outputs.data, theirs.outputs.data)
        for wanted, got in zip(scores, found[12:], strict=True):
            assert [o.outputs.score for o in got] == pytest.approx(
                [o.outputs.score for o in wanted]
            )
    nothing_runs(embedder)
    nothing_runs(reranker)


def test_a_refused_call_leaves_those_of_other_threads_alone(embedder: LLM) -> None:
    texts = [text(9, i) for i in range(8)]
    alone = embedder.embed(texts, **QUIET)

    def refused() -> None:
        for _ in range(5):
            with pytest.raises(RequestError, match="not a token id"):
                embedder.embed(["fine", [999_999]], **QUIET)

    found, *_ = side_by_side([lambda: embedder.embed(texts, **QUIET), refused, refused])
    assert [o.prompt_token_ids for o in found] == [o.prompt_token_ids for o in alone]
    nothing_runs(embedder)


def test_metrics_of_what_was_pooled(tmp_path: Path) -> None:
    def counted(llm: Any, name: str, task: str) -> int:
        (found,) = [
            m for m in llm.get_metrics()
            if m.name == f"headrace:{name}" and m.labels.get("task") == task
        ]  # fmt: skip
        return int(found.value)

    with opened(tmp_path, disable_log_stats=False) as llm:
        outputs = llm.embed([text(5, 1), text(9, 2)], **QUIET)
        assert counted(llm, "pooling_requests", "embed") == 2
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        assert counted(llm, "pooling_prompt_tokens", "embed") == tokens
        llm.score(text(5, 1), [text(9, 2), text(4, 3)], **QUIET)
        assert counted(llm, "pooling_requests", "score") == 2
        assert counted(llm, "pooling_requests", "embed") == 2
    with LLMEngine(EngineArgs(model=str(tmp_path), **SETTINGS)) as engine:
        engine.add_request("a", text(5, 1), PoolingParams(task="embed"))
        while engine.has_unfinished_requests():
            engine.step()
        assert counted(engine, "pooling_requests", "embed") == 1
