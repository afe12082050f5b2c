"""Updates of weights that go wrong on their way: what was there before stays, and the engine serves on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from servers import PATIENCE
from test_weight_updates import NORM, PROMPT, QUERY, SETTINGS, answer, make

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams
from headrace.weight_transfer import STREAMED, SharedWeights, TrainerGroup, WeightSender, described
from headrace_core.errors import CapacityError, EngineAsleep, RequestError, WeightsError
from headrace_engine.weights import broadcast
from headrace_engine.weights.worker import ModelWorker
from headrace_models.loading.loader import Filling
from headrace_testing.waiting import wait_until


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return make(folder / "old", 1), make(folder / "new", 2)


@pytest.fixture(scope="module")
def weights(checkpoints: tuple[Path, Path]) -> dict[str, torch.Tensor]:
    return load_file(checkpoints[1] / "model.safetensors")


@pytest.fixture(scope="module")
def answers(checkpoints: tuple[Path, Path]) -> list[Any]:
    """Of the old weights, and of the new ones."""
    found = []
    for path in checkpoints:
        with LLM(str(path), **SETTINGS) as llm:
            found.append(answer(llm))
    return found


@pytest.fixture(scope="module")
def shared_llm(checkpoints: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(str(checkpoints[0]), **SETTINGS, enable_sleep_mode=True) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM, answers: list[Any], weights: dict[str, torch.Tensor]) -> Iterator[LLM]:
    """With the old weights. Whatever a test did, a whole update brings the new ones afterwards."""
    yield shared_llm
    shared_llm.cancel_weight_update()
    assert shared_llm.update_weights(weights)["num_tensors"] == len(weights)
    assert answer(shared_llm) == answers[1]
    shared_llm.collective_rpc("close_weight_transfer")
    shared_llm.collective_rpc("reload_weights")


def in_halves(weights: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    names = sorted(weights)
    return tuple({n: weights[n] for n in part} for part in (names[:9], names[9:]))  # type: ignore[return-value]


def with_nan(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**weights, next(iter(weights)): next(iter(weights.values())) * torch.nan}


def test_an_empty_update_is_not_open(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    assert llm.update_weights({}, finish=False)["num_tensors"] == 0
    assert llm.update_weights(None, finish=False)["num_tensors"] == 0
    with pytest.raises(RequestError, match="no tensors have come"):
        llm.update_weights({})
    # So a single call that is refused is forgotten, as it began the update.
    with pytest.raises(RequestError, match="are missing"):
        llm.update_weights({QUERY: weights[QUERY]})
    with pytest.raises(RequestError, match="no tensors have come"):
        llm.update_weights()
    llm.sleep(level=1)
    llm.wake_up()


@pytest.mark.parametrize("way", ["process", "stream"])
def test_nothing_comes_between_parts(
    llm: LLM,
    weights: dict[str, torch.Tensor],
    checkpoints: tuple[Path, Path],
    answers: Any,
    way: str,
) -> None:
    """Sleep, a reload and a swap are refused by name, and forget nothing."""
    first, last = in_halves(weights)
    if way == "process":
        llm.update_weights(first, finish=False)
    else:
        with WeightSender(**llm.collective_rpc("open_weight_stream")[0]) as sender:
            sender.send(first)
    for call in (
        lambda: llm.sleep(level=1),
        lambda: llm.sleep(level=2),
        lambda: llm.collective_rpc("reload_weights"),
        lambda: llm.swap_weights(checkpoints[1]),
    ):
        with pytest.raises(RequestError, match="an update of the weights is open") as caught:
            call()
        assert caught.value.param == "method"
    assert answer(llm)[:2] == answers[0][:2]
    if way == "stream":
        llm.update_weights({**STREAMED, "finish": False})
    assert llm.update_weights(last)["num_tensors"] == len(weights)
    assert answer(llm) == answers[1]


def test_a_refused_part_leaves_those_before_it(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any
) -> None:
    first, last = in_halves(weights)
    llm.update_weights(first, finish=False)
    for refused in (with_nan(last), first, {"x": weights[NORM]}, {NORM: weights[NORM].int()}):
        for finish in (True, False):
            with pytest.raises(RequestError):
                llm.update_weights(refused, finish=finish)
    # A call that ends too early has its tensors taken: they are ours by then.
    mine = {name: tensor.clone() for name, tensor in list(last.items())[:1]}  # of a fused layer
    with pytest.raises(RequestError, match="are missing"):
        llm.update_weights(mine)
    for tensor in mine.values():
        tensor.fill_(torch.nan)
    llm.update_weights({name: tensor for name, tensor in last.items() if name not in mine})
    assert answer(llm) == answers[1]


def test_parts_of_a_stream_wait_on(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any
) -> None:
    """What the engine has taken is not sent twice, whatever becomes of the call that puts it in."""
    first, last = in_halves(weights)
    with WeightSender(**llm.collective_rpc("open_weight_stream")[0]) as sender:
        sender.send(first)
        for mode in (None, "abort"):
            with pytest.raises(RequestError, match="are missing"):
                llm.update_weights(STREAMED, mode=mode)
        with pytest.raises(RequestError, match="nothing with weights of its own guesses"):
            llm.update_weights({**STREAMED, "target": "draft"})
        with pytest.raises(RequestError, match="NaN of"):
            sender.send(with_nan(last))
    with WeightSender(**llm.collective_rpc("open_weight_stream")[0]) as sender:  # another stream
        sender.send(first)
        sender.send(last)
    assert llm.update_weights(STREAMED)["num_tensors"] == len(weights)
    assert answer(llm) == answers[1]


@pytest.mark.parametrize("finish", [True, False])
def test_no_memory_while_a_part_is_packed(
    llm: LLM,
    weights: dict[str, torch.Tensor],
    answers: Any,
    monkeypatch: pytest.MonkeyPatch,
    finish: bool,
) -> None:
    first, last = in_halves(weights)
    llm.update_weights(first, finish=False)
    load, loaded = Filling.load, list[str]()

    def refused(self: Filling, leaf: str) -> None:
        if len(loaded) == 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        loaded.append(leaf)
        load(self, leaf)

    with monkeypatch.context() as patch:
        patch.setattr(Filling, "load", refused)
        with pytest.raises(CapacityError, match=r"update_weights: .*refused the memory"):
            llm.update_weights(last, finish=finish)
    assert len(loaded) == 2
    assert answer(llm)[:2] == answers[0][:2]
    assert llm.update_weights(last)["num_tensors"] == len(weights)
    assert answer(llm) == answers[1]


def test_no_memory_when_steps_are_recorded(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last moment at which an update can fail: it is open as before, and may be finished again."""
    first, last = in_halves(weights)
    llm.update_weights(first, finish=False)
    llm.update_weights(last, finish=False)
    with monkeypatch.context() as patch:
        settle = ModelWorker._settle_and_record

        def refused(self: ModelWorker) -> None:
            patch.setattr(ModelWorker, "_settle_and_record", settle)
            raise MemoryError("no memory for recordings")

        patch.setattr(ModelWorker, "_settle_and_record", refused)
        with pytest.raises(CapacityError, match="no memory for recordings"):
            llm.update_weights()
    assert llm.weights_version == "0" or llm.weights_version.isdigit()
    assert answer(llm)[0] == answers[0][0]
    llm.update_weights()
    assert answer(llm) == answers[1]


def test_tensors_without_plain_numbers(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    norm = weights[NORM]
    for tensor, message in (
        (norm.to_sparse(), "is sparse .*must be dense"),
        (norm.to("meta"), "device 'meta'"),
        (norm.to(torch.complex64), "has dtype complex64"),
        (norm.long(), "has dtype int64, the model needs"),
        (norm.bool(), "has dtype bool, the model needs"),
        (norm.to(torch.float8_e5m2), "has dtype float8_e5m2, the model needs"),
        (norm.double(), "has dtype float64, the model needs float32 or float16 or bfloat16"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.update_weights({NORM: tensor})
    for tensor in (norm.half(), norm.bfloat16(), torch.stack([norm, norm], 1)[:, 0]):
        assert llm.update_weights({NORM: tensor})["finished"]


def test_names_and_counts_are_bounded(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    """50,000 empty tensors that nobody knows would take many seconds to look at."""
    none = torch.zeros(0)
    many = {f"unknown.{index}": none for index in range(50_000)}
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"50000 in one part: must be at most \d{4}"):
        llm.update_weights(many)
    places = [{"name": name, "dtype": "float32", "shape": [0]} for name in many]
    with SharedWeights() as shared:
        told = {**shared.write({NORM: weights[NORM]}), "tensors": places}
        with pytest.raises(RequestError, match="50000 in one part"):
            llm.update_weights(told)
        (norm,) = shared.write({NORM: weights[NORM]})["tensors"]
        with pytest.raises(RequestError, match="comes twice in one part"):
            llm.update_weights({**told, "tensors": [norm] * 1000})
    assert time.monotonic() - began < PATIENCE
    for given in (
        {"a\nERROR: b": weights[NORM]}, {"a\0": weights[NORM]}, {"a" * 5000: weights[NORM]},
        {f"unknown.{index}": weights[NORM] for index in range(1000)},
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            llm.update_weights(given)
        assert len(str(caught.value)) < 1500
        assert str(caught.value).isprintable()


def test_a_stream_goes_on_through_sleep(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any
) -> None:
    """While the weights sleep it says so; once there is memory for them, it takes parts again."""
    first, last = in_halves(weights)
    opened = llm.collective_rpc("open_weight_stream")[0]
    llm.sleep(level=2)
    with pytest.raises(RequestError, match="open_weight_stream: the weights sleep"):
        llm.collective_rpc("open_weight_stream")
    with WeightSender(**opened) as sender, pytest.raises(RequestError, match="no model now"):
        sender.send(first)
    llm.wake_up(tags=["weights"])
    with WeightSender(**opened) as sender:
        sender.send(first)
    with pytest.raises(RequestError, match="are missing"):
        llm.update_weights(STREAMED)
    with WeightSender(**llm.collective_rpc("open_weight_stream")[0]) as sender:
        sender.send(first)  # those that waited went with the stream before
        sender.send(last)
        with pytest.raises(RequestError, match="comes twice"):
            sender.send(last)
    llm.update_weights(STREAMED)
    llm.wake_up()
    assert answer(llm) == answers[1]


def test_weights_after_a_reload_that_failed(
    checkpoints: tuple[Path, Path], weights: dict[str, torch.Tensor], answers: Any, tmp_path: Path
) -> None:
    """The engine has none then: an update brings all, without having slept."""
    folder = shutil.copytree(checkpoints[0], tmp_path / "broken")
    with LLM(str(folder), **SETTINGS) as llm:
        (
            folder / "model.safetensors"
        ).unlink()  # it may be mapped: what is cut off could not be read
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            llm.collective_rpc("reload_weights")
        with pytest.raises(EngineAsleep, match="has no weights"):
            answer(llm)
        with pytest.raises(RequestError, match="are missing"):
            llm.update_weights({NORM: weights[NORM]})
        llm.update_weights(weights, version="whole")
        assert answer(llm) == answers[1]
        assert llm.weights_version == "whole"


def test_no_memory_for_the_cache_behind_new_weights(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After level 2 the cache is made when weights have come: without it the call may be repeated."""
    llm.sleep(level=2)
    llm.wake_up()
    with monkeypatch.context() as patch:

        def refused(*_: object) -> None:
            raise MemoryError("no memory for the cache")

        patch.setattr(ModelWorker, "allocate_cache", refused)
        with pytest.raises(CapacityError, match="no memory for the cache"):
            llm.update_weights(weights)
        with pytest.raises(EngineAsleep):
            answer(llm)
    llm.update_weights(weights)
    assert answer(llm) == answers[1]


class Silent:
    """Accepts connections, and says nothing."""

    def __enter__(self) -> Silent:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self.came = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        while True:
            try:
                self._connections.append(self._listener.accept()[0])
            except OSError:
                return
            self.came.set()

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._connections:
            one.close()


def in_thread(call: Any) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_a_trainer_that_says_nothing(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine serves while it waits to join, and gives up in time."""
    monkeypatch.setattr(broadcast, "JOIN_SECONDS", 5.0)
    with Silent() as trainer:
        at = ("127.0.0.1", trainer.port, 1, 2)

        def join() -> None:
            llm.collective_rpc("init_weight_update_group", args=at)

        thread, raised = in_thread(join)
        assert trainer.came.wait(PATIENCE)
        assert answer(llm)[:2] == answers[0][:2]
        if thread.is_alive():
            with pytest.raises(RequestError, match="a group is being joined: must wait"):
                join()
        thread.join(PATIENCE)
        (error,) = raised
        assert isinstance(error, RequestError)
        assert "did not answer within 5 seconds" in str(error)
        with pytest.raises(RequestError, match="init_weight_update_group comes first"):
            llm.update_weights(described(weights))
    wait_until(lambda: not any(t.name == broadcast._JOINER for t in threading.enumerate()))


def test_a_trainer_that_stops_in_the_middle(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any
) -> None:
    """It lives, and sends no more: the engine serves, refuses what would come between, and can be told to
    wait no longer."""
    group = TrainerGroup(world_size=2)
    has_sent, goes_on = threading.Event(), threading.Event()

    def send_half() -> None:
        group.wait()
        group.send(dict(list(weights.items())[:3]))
        has_sent.set()
        goes_on.wait(PATIENCE)
        with contextlib.suppress(RuntimeError):  # the engine has left the group
            group.send(dict(list(weights.items())[3:4]))

    half = threading.Thread(target=send_half)
    half.start()
    llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", group.port, 1, 2))
    thread, raised = in_thread(lambda: llm.update_weights(described(weights)))
    assert has_sent.wait(PATIENCE)
    assert answer(llm)[:2] == answers[0][:2]
    for call in (
        lambda: llm.update_weights({NORM: weights[NORM]}),
        lambda: llm.sleep(level=2),
        lambda: llm.swap_weights("/nowhere"),
        lambda: llm.update_weights(described(weights)),
    ):
        with pytest.raises(RequestError, match="of a broadcast are on their way: must wait"):
            call()
    llm.cancel_weight_update()
    goes_on.set()
    thread.join(PATIENCE)
    half.join(PATIENCE)
    (error,) = raised
    assert isinstance(error, RequestError)
    assert "was not received: the update was cancelled" in str(error)
    assert answer(llm)[:2] == answers[0][:2]


DYING = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from headrace.weight_transfer import TrainerGroup

weights = load_file(Path(sys.argv[1]) / "model.safetensors")
group = TrainerGroup(world_size=2)
print(group.port, flush=True)
group.wait()
group.send(dict(list(weights.items())[:3]))
print("half", flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_is_killed_while_it_sends(
    llm: LLM, weights: dict[str, torch.Tensor], answers: Any, checkpoints: tuple[Path, Path]
) -> None:
    """The call says which tensor did not come; a new trainer's group is joined afterwards."""
    child = subprocess.Popen(
        [sys.executable, "-c", DYING, str(checkpoints[1])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        port = int(child.stdout.readline())
        llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", port, 1, 2))
        thread, raised = in_thread(lambda: llm.update_weights(described(weights)))
        assert child.stdout.readline() == "half\n"
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(PATIENCE)
        child.stdin.close()
        child.stdout.close()
    thread.join(PATIENCE)
    (error,) = raised
    assert isinstance(error, RequestError)
    assert "did not come" in str(error)
    assert answer(llm)[:2] == answers[0][:2]
    with pytest.raises(RequestError, match="init_weight_update_group comes first"):
        llm.update_weights(described(weights))
    group = TrainerGroup(world_size=2)
    sends = threading.Thread(target=lambda: (group.wait(), group.send(weights)))
    sends.start()
    llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", group.port, 1, 2))
    llm.update_weights(described(weights))
    sends.join(PATIENCE)
    assert answer(llm) == answers[1]


async def test_an_abort_for_nothing(
    checkpoints: tuple[Path, Path], weights: dict[str, torch.Tensor]
) -> None:
    """An update that is not whole is refused before requests are ended for it."""
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(checkpoints[0]), **SETTINGS))
    params = SamplingParams(temperature=0, max_tokens=80, detokenize=False, ignore_eos=True)
    begun = asyncio.Event()

    async def run() -> Any:
        last = None
        async for output in llm.generate(PROMPT, params, "runs"):
            last = output
            begun.set()
        return last

    running = asyncio.create_task(run())
    await begun.wait()
    with pytest.raises(RequestError, match="are missing"):
        await llm.update_weights({QUERY: weights[QUERY]}, mode="abort")
    output = await running
    assert output.outputs[0].finish_reason == "length"
    await llm.shutdown()
