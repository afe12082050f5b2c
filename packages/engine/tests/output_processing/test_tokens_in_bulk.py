"""Tokens that come in bulk have the effect of an output each."""

from __future__ import annotations

import dataclasses
import random

import pytest

from headrace_core.request import CoreRequest
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_engine.output_processing import unread_tokens
from headrace_engine.output_processing.output import StreamState
from headrace_engine.output_processing.output_processor import OutputProcessor


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a few requests are kept, too."""
    monkeypatch.setattr(unread_tokens, "FEWEST_REQUESTS", 1)


class Letters:
    """A tokenizer whose tokens are letters."""

    special_token_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([96 + token_id])

    first_token_bytes = token_bytes


def prepared(name: str, n: int = 1, **params: object) -> PreparedRequest:
    asked = SamplingParams(n=n, max_tokens=50, **params)  # type: ignore[arg-type]
    cores = [
        CoreRequest(f"{name}-{index}", [1, 2], asked, frozenset(), 50, 0.0) for index in range(n)
    ]
    return PreparedRequest(name, None, [1, 2], asked, cores, 0.0)


def steps(*, bulk: bool) -> list[CoreOutputs]:
    """First outputs, then single tokens, of which one request's versions change on the way."""
    names = ["delta-0", "final-0", "both-0", "both-1", "stop-0", "nobody-0"]
    found = [CoreOutputs([CoreOutput(name, [1]) for name in names], 1.0, None, "0")]
    for number, version in enumerate(["0", "0", "1", "1", "0"]):
        tokens = {name: 1 + (number + at) % 5 for at, name in enumerate(names)}
        step = CoreOutputs([], 2.0 + number, None, version)
        if bulk:
            step.tokens = tokens
        else:
            step.outputs = [CoreOutput(name, [token]) for name, token in tokens.items()]
        found.append(step)
    return found


def run(*, bulk: bool) -> list[object]:
    processor = OutputProcessor(Letters())  # type: ignore[arg-type]
    delta = RequestOutputKind.DELTA
    states = [
        processor.add(prepared("delta", output_kind=delta)),
        processor.add(prepared("final", output_kind=RequestOutputKind.FINAL_ONLY)),
        processor.add(prepared("both", 2, output_kind=RequestOutputKind.CUMULATIVE)),
        processor.add(prepared("stop", output_kind=delta, stop=["da", "abc"])),
    ]
    seen: list[object] = []
    for number, step in enumerate(steps(bulk=bulk)):
        if number == 4:
            processor.end(["delta"], "abort")  # what comes afterwards is not for it
        processed = processor.process(step)
        changed = [one.request.request_id for one in processed.changed if one.ready]
        seen.append((sorted(changed), processed.abort_core_ids))
        seen += [state.take() for state in states]
    processor.end([state.request.request_id for state in states], "abort")
    return [*seen, *(state.take() for state in states)]


def test_tokens_in_bulk_are_outputs() -> None:
    assert run(bulk=True) == run(bulk=False)


def test_a_stop_string_in_a_token_of_many_aborts_its_request() -> None:
    aborts = [one[1] for one in run(bulk=True) if isinstance(one, tuple)]
    assert ["stop-0"] in aborts


def test_a_request_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = OutputProcessor(Letters())  # type: ignore[arg-type]
    good, bad = (processor.add(prepared(name, stop=["x"])) for name in ("good", "bad"))
    processor.process(CoreOutputs([CoreOutput("good-0", [1]), CoreOutput("bad-0", [1])], 1.0))
    monkeypatch.setattr(bad, "add_token", None)
    processed = processor.process(CoreOutputs([], 2.0, tokens={"bad-0": 2, "good-0": 2}))
    assert processed.abort_core_ids == ["bad-0"]
    assert "failed: TypeError" in str(bad.error)
    assert good.error is None
    good.end("abort")
    output = good.take()
    assert output is not None
    assert output.outputs[0].token_ids == [1, 2]


def feed(processor: OutputProcessor, number: int, tokens: dict[str, int], *, bulk: bool) -> None:
    """A step's tokens; weights change once."""
    step = CoreOutputs([], 2.0 + number, None, "0" if number < 50 else "1")
    if bulk:
        step.tokens = tokens
    else:
        step.outputs = [CoreOutput(name, [token]) for name, token in tokens.items()]
    processor.process(step)


def long_run(*, bulk: bool) -> list[object]:
    """Requests that hand nothing out before their ends, which come in any step, by the core or from outside,
    and without a part in some steps."""
    final = RequestOutputKind.FINAL_ONLY
    processor, draw, seen = OutputProcessor(Letters()), random.Random(3), []  # type: ignore[arg-type]
    states = [processor.add(prepared(f"{i}", output_kind=final)) for i in range(40)]
    firsts = [CoreOutput(f"{i}-0", [1]) for i in range(40)]
    processor.process(CoreOutputs(firsts, 1.0, None, "0"))
    for number in range(120):
        here = [state for state in states if not state.finished and draw.random() < 0.95]
        tokens = {f"{state.request.request_id}-0": 1 + draw.randrange(5) for state in here}
        ended = draw.choice(here) if here and draw.random() < 0.3 else None
        if ended is not None:
            name = f"{ended.request.request_id}-0"
            last = CoreOutput(name, [tokens.pop(name)], finish_reason="length")
            processor.process(CoreOutputs([last], 2.0 + number, None, "0" if number < 50 else "1"))
            seen.append(ended.take())
        feed(processor, number, tokens, bulk=bulk)
        asked = draw.choice(states)
        if isinstance(asked, StreamState):
            seen.append(dataclasses.replace(asked.metrics))
        if number == 70:
            processor.end(["7"], "abort")
    processor.end([state.request.request_id for state in states], "abort")
    return [*seen, *(state.take() for state in states)]


def test_tokens_that_are_read_late_are_outputs() -> None:
    assert long_run(bulk=True) == long_run(bulk=False)
