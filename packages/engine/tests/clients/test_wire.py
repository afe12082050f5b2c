"""Frames between processes: every message there and back, and garbage refused by type."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from headrace_core.arrays import PackedArray
from headrace_core.engine import EngineStats
from headrace_core.errors import (
    CapacityError,
    ConfigError,
    EngineDead,
    MissingDependency,
    QueueFull,
    RequestError,
)
from headrace_core.lora import LoRARequest
from headrace_core.multimodal import ProcessedMedia
from headrace_core.output import StepTimes
from headrace_core.request import CoreRequest, PromptEmbeds, ThinkingBudget
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import TokenLogprobs
from headrace_engine.clients import wire
from headrace_engine.messages import CoreOutput, CoreOutputs, TimedStep
from headrace_engine.shared_objects.named_items import NamedItem, NamedPlace, form_of

REQUEST = CoreRequest(
    request_id="r#1.0",
    prompt_token_ids=[1, 2, 70_000],
    params=SamplingParams(
        temperature=0.5, seed=-(2**40), stop=["a"], stop_token_ids=[3], logit_bias={5: -1.5},
        logprobs=2, bad_words=["x"], extra_args={"a": [1, "b", None]}, max_tokens=None,
    ),
    stop_token_ids=frozenset({1, 2}),
    max_tokens=9,
    arrival_time=1.5,
    cache_salt="salt",
    bad_words_token_ids=[[1], [2, 3]],
    prompt_embeds=PromptEmbeds.of("bfloat16", 3, 2, bytes(range(12))),
    thinking=ThinkingBudget(4, [7], [5, 6]),
    num_attended_tokens=2,
    lora_request=LoRARequest("french", 1, "/a"),
)  # fmt: skip
LOGPROBS = [TokenLogprobs([1, 2], [-0.5, -1.0], [1, 2])]
OUTPUTS = CoreOutputs(
    [CoreOutput("r#1.0", [5], logprobs=LOGPROBS, prompt_logprobs=LOGPROBS, finish_reason="stop",
                stop_token_id=5)],
    12.5,
    TimedStep(["r#1.0", "r#1.1"], StepTimes(0.25, None, 0.5)),
    "step 1200",
    {"r#1.0": ["0", "step 600"]},
    {"r#1.1": 7},
)  # fmt: skip
FORM = form_of(ProcessedMedia({}, 3, (1, 2, 1), ((1, 1),)))
ITEM = NamedItem(FORM, {"x": PackedArray("int64", (1,), bytes(8))})
COMMANDS = [
    wire.Add([REQUEST]),
    wire.Abort(["r#1.0"]),
    wire.Suspend(["r#1.0"]),
    wire.Resume(["r#1.0", "r#1.1"]),
    wire.GetStats(1, True),
    wire.ResetPrefixCache(2, False),
    wire.Add([REQUEST], named=[NamedPlace(0, 0, "name", FORM)]),
    wire.Recall(3, "name"),
    wire.AddLoRA(3, LoRARequest("french", 1, "/a", "base")),
    wire.RemoveLoRA(4, 1),
    wire.ListLoRAs(5),
    wire.Stop(),
]
REPORTS = [
    wire.RecallReply(3, ITEM),
    wire.RecallReply(3, None),
    wire.Ready([wire.StartPhase("load", 1.0)], "plan"),
    wire.Failed(wire.RemoteError("CapacityError", "too large")),
    wire.Outputs(OUTPUTS),
    wire.StatsReply(1, EngineStats(step_tokens=[1, 2], running_loras={"french": 2})),
    wire.DoneReply(2, True),
    wire.LoRAsReply(3, (LoRARequest("french", 1, "/a", "base"),)),
    wire.ErrorReply(3, wire.RemoteError("ValueError", "x")),
    wire.Heartbeat(0.5),
    wire.Died(wire.RemoteError("RuntimeError", "x")),
]


@pytest.mark.parametrize("message", COMMANDS, ids=lambda m: type(m).__name__)
def test_commands_there_and_back(message: Any) -> None:
    frame = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.Decoder(wire.Command).decode(frame) == message


@pytest.mark.parametrize("message", REPORTS, ids=lambda m: type(m).__name__)
def test_reports_there_and_back(message: Any) -> None:
    frame = msgspec.msgpack.encode(message)
    found = msgspec.msgpack.Decoder(wire.Report).decode(frame)
    assert found == message
    if isinstance(found, wire.Outputs):
        assert isinstance(found.outputs.outputs[0].logprobs, list)
        assert isinstance(found.outputs.outputs[0].logprobs[0], TokenLogprobs)


@pytest.mark.req("SEC-01")
@pytest.mark.parametrize(
    ("messages", "kind"), [(COMMANDS, wire.Command), (REPORTS, wire.Report)], ids=["down", "up"]
)
def test_mutated_frames_are_refused_by_type(messages: list[Any], kind: Any) -> None:
    rng = random.Random(7)
    decoder = wire.FrameDecoder(kind)
    frames = [msgspec.msgpack.encode(message) for message in messages]
    refused = 0
    for _ in range(20_000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        if rng.random() < 0.3:
            frame = frame[: rng.randrange(len(frame))]
        try:
            decoder.decode(bytes(frame))
        except wire.BadFrame:
            refused += 1
    assert refused > 5000


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (CapacityError("too large"), {}),
        (ConfigError("wrong", field="cache.block_size"), {"field": "cache.block_size"}),
        (RequestError("wrong", param="prompt"), {"param": "prompt"}),
        (QueueFull("full", retry_after=2.5), {"retry_after": 2.5}),
        (
            MissingDependency("ray", needed_for="it", install="pip install ray"),
            {"library": "ray", "install": "pip install ray"},
        ),
        (EngineDead("dead"), {}),
    ],
    ids=lambda v: type(v).__name__,
)
def test_our_errors_keep_their_class(error: Exception, kept: dict[str, Any]) -> None:
    frame = msgspec.msgpack.encode(wire.as_data(error))
    found = wire.as_exception(msgspec.msgpack.decode(frame, type=wire.RemoteError))
    assert type(found) is type(error)
    assert str(found) == str(error)
    for name, value in kept.items():
        assert getattr(found, name) == value


def test_foreign_errors_become_data() -> None:
    found = wire.as_exception(wire.as_data(ZeroDivisionError("by zero")))
    assert type(found) is EngineDead
    assert "ZeroDivisionError: by zero" in str(found)
    # Only classes of ours are looked up by name.
    assert type(wire.as_exception(wire.RemoteError("Any", "x"))) is EngineDead


@pytest.mark.req("SEC-01")
def test_no_pickle_in_the_package() -> None:
    from pathlib import Path

    package = Path(wire.__file__).parents[1]
    words = ("import pickle", "cloudpickle", "marshal", " eval(", " exec(", "send_pyobj")
    for folder in ("clients", "input_processing", "output_processing"):
        for path in (package / folder).glob("*.py"):
            assert not any(word in path.read_text() for word in words), path
