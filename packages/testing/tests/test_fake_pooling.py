"""The fake engine's pooled results: tests elsewhere reckon with them."""

from __future__ import annotations

import asyncio

import pytest

from headrace_core.engine import EngineClient
from headrace_core.errors import PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.pooling import PoolingParams
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model


def encode(engine: FakeEngine, text: str, task: str, **params: object) -> object:
    given = PoolingParams(**params)  # type: ignore[arg-type]
    return asyncio.run(engine.encode(text, given, "r", task=task)).outputs.data.tolist()


def test_vectors_are_code_points() -> None:
    engine = FakeEngine(model=fake_pooling_model())
    assert encode(engine, "Hi", "embed", normalize=False) == [72.0, 105.0, 0.0, 0.0]
    assert encode(engine, "Hi", "embed", normalize=False, dimensions=1) == [72.0]
    assert encode(engine, "\3\4", "embed") == pytest.approx([0.6, 0.8, 0.0, 0.0])
    assert encode(engine, "Hi", "token_embed", normalize=False) == [[72, 0, 0, 0], [105, 1, 0, 0]]
    cut = encode(engine, "Hi", "embed", normalize=False, truncate_prompt_tokens=1)
    assert cut == [105.0, 0.0, 0.0, 0.0]


def test_labels_are_votes() -> None:
    engine = FakeEngine(model=fake_pooling_model("classify", "token_classify"))
    assert encode(engine, "abc", "classify", use_activation=False) == [1.0, 2.0]
    assert sum(encode(engine, "abc", "classify")) == pytest.approx(1)  # type: ignore[call-overload]
    rows = encode(engine, "ab", "token_classify", use_activation=False)
    assert rows == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize("tasks", [("classify", "score"), ("embed",)])
def test_scores_are_shares(tasks: tuple[str, ...]) -> None:
    engine = FakeEngine(model=fake_pooling_model(*tasks))
    outputs = asyncio.run(engine.score(["abc"], ["abx", {"prompt": "c"}], PoolingParams(), "r"))
    assert [output.outputs.score for output in outputs] == [pytest.approx(2 / 3), 1.0]
    assert [call.prompt_text for call in engine.pooled] == ["abcabx", "abcc"]


def test_refusals() -> None:
    engine = FakeEngine(model=fake_pooling_model(max_model_len=3))
    with pytest.raises(UnsupportedFeature, match="classify"):
        encode(engine, "a", "classify")
    with pytest.raises(PromptTooLong):
        encode(engine, "abcd", "embed")
    with pytest.raises(RequestError, match="dimensions"):
        encode(engine, "a", "embed", dimensions=5)
    assert engine.pooled == []


def test_a_cancelled_call_is_aborted() -> None:
    async def run(engine: EngineClient) -> None:
        call = asyncio.ensure_future(engine.encode("a", PoolingParams(), "r", task="embed"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    engine = FakeEngine(model=fake_pooling_model(), gate=asyncio.Event())
    asyncio.run(run(engine))
    assert (engine.aborted, engine.num_running) == (["r"], 0)
