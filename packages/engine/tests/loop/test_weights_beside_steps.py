"""Updates in the core: what waits for a trainer runs beside steps, and nothing comes between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_fakes import (
    CharTokenizer,
    FakeExecutor,
    expected_tokens,
    make_core,
    served_model,
)

from headrace_core.errors import CapacityError, RequestError, UnsupportedFeature, WeightsError
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.weights.messages import WeightsMessage
from headrace_testing.waiting import until

JOIN = ["127.0.0.1", 7, 1, 2]
BROADCAST = {"source": "broadcast", "tensors": [{"name": "w", "dtype": "bool", "shape": [1]}]}
GIVEN: dict[str, Any] = {"source": "process", "given": []}


class Holder:
    """The methods of a worker that an update needs: counts tensors."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.staged = self.waiting = 0
        self.fails: dict[str, BaseException] = {}

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if (error := self.fails.get(name)) is not None:
            raise error

    def expect_weights(self, message: WeightsMessage) -> None:
        self._called("expect")

    def stage_weights(self, message: WeightsMessage) -> int:
        self._called("stage")
        self.staged += message.source is not None
        return self.staged

    def held_weights(self) -> tuple[int, int]:
        return self.staged, self.waiting

    def update_changes_model(self) -> bool:
        return True

    def seal_weights(self) -> None:
        self._called("seal")

    def apply_weights(self, keep_requests: bool) -> None:
        self._called("apply")
        self.staged = 0

    def refuse_weights(self) -> None:
        self._called("refuse")
        self.staged = 0

    def drop_weights(self) -> None:
        self._called("drop")
        self.staged = self.waiting = 0

    def close_weight_transfer(self) -> None:
        self._called("close")


class Updating:
    """An engine whose worker's side of an update, and what runs beside steps, the test holds."""

    def __init__(self) -> None:
        core = make_core()
        assert isinstance(core.executor, FakeExecutor)
        self.executor, self.holder = core.executor, Holder()
        for name in dir(Holder):
            if not name.startswith("_"):
                setattr(core.executor.worker, name, getattr(self.holder, name))
        self.engine = Engine(
            InprocClient(lambda _: core), InputProcessor(CharTokenizer(), served_model())
        )

    def call(self, method: str, *args: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.engine.collective_rpc(method, args=list(args)))

    def update(self, **message: Any) -> asyncio.Task[Any]:
        return self.call("update_weights", message)

    async def serves(self) -> None:
        """A request is computed."""
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        (*_, last) = [o async for o in self.engine.generate("serves", params, "r")]
        assert list(last.outputs[0].token_ids) == expected_tokens("serves", params)

    async def beside(self, count: int) -> Any:
        """The future of the last of so many calls beside steps."""
        await until(lambda: len(self.executor.beside) >= count)
        return self.executor.beside[-1][1]


@pytest.fixture
async def updating() -> AsyncIterator[Updating]:
    made = Updating()
    await made.serves()
    yield made
    await made.engine.shutdown()


async def test_joining_holds_nobody(updating: Updating) -> None:
    joins = updating.call("init_weight_update_group", *JOIN)
    joined = await updating.beside(1)
    assert updating.executor.beside[0][0] == ("init_weight_update_group", *JOIN)
    await updating.serves()
    for again in (updating.call("init_weight_update_group", *JOIN), updating.update(**BROADCAST)):
        with pytest.raises(RequestError, match="a group is being joined: must wait"):
            await again
    await updating.update(**GIVEN, finish=False)
    await updating.update(cancel=True)
    joined.set_exception(RequestError("nobody answered", param="master_address"))
    with pytest.raises(RequestError, match="nobody answered"):
        await joins
    with pytest.raises(RequestError, match="takes 4, 1 given"):
        await updating.call("init_weight_update_group", "x")


async def test_a_broadcast_is_received_and_then_staged(updating: Updating) -> None:
    update = updating.update(**BROADCAST)
    received = await updating.beside(1)
    assert updating.holder.calls == ["expect"]
    await updating.serves()
    between = [updating.update(**GIVEN), updating.update(**BROADCAST), updating.call("sleep", 2)]
    between += [updating.call("swap_weights", {"path": "/new"})]
    for call in between[:2] + between[3:]:
        with pytest.raises(RequestError, match="of a broadcast are on their way: must wait"):
            await call
    with pytest.raises(Exception, match="cannot sleep"):
        await between[2]
    received.set_result([None])
    (told,) = await update
    assert (told["began"], told["finished"], told["weights_version"]) == (True, True, "1")
    assert updating.holder.calls == ["expect", "stage", "seal", "apply"]
    updating.holder.calls.clear()
    update = updating.update(**BROADCAST)
    (await updating.beside(2)).set_exception(MemoryError("no memory for w"))
    with pytest.raises(CapacityError, match="no memory for w"):
        await update
    assert updating.holder.calls == ["expect"]
    await updating.update(**GIVEN)


async def test_what_a_refused_call_leaves(updating: Updating) -> None:
    """Nothing of an update that it would have been alone; all of one that it was to be a part of."""
    holder = updating.holder
    for step, error in (
        ("stage", WeightsError("unknown")),
        ("seal", WeightsError("are missing")),
        ("apply", MemoryError("none")),
    ):
        holder.fails = {step: error}
        with pytest.raises((RequestError, CapacityError), match=str(error)):
            await updating.update(**GIVEN)
        assert (holder.staged, "refuse" in holder.calls) == (0, step != "stage")
        holder.calls.clear()
        holder.fails = {}
        await updating.update(**GIVEN, finish=False)
        holder.fails = {step: error}
        with pytest.raises((RequestError, CapacityError), match=str(error)):
            await updating.update(**GIVEN)
        assert holder.calls.pop() == step
        holder.fails = {}
        (told,) = await updating.update(source=None)
        assert (told["began"], told["finished"]) == (False, True)


async def test_what_is_open(updating: Updating) -> None:
    """An update of which tensors have come, or wait; not one without any."""
    holder = updating.holder
    await updating.update(source=None, finish=False)
    holder.waiting = 3
    with pytest.raises(RequestError, match="swap_weights") as caught:
        await updating.call("swap_weights", {"path": "/new"})
    assert "(0 tensors were taken, 3 wait)" in str(caught.value)
    await updating.update(cancel=True)
    swap = updating.call("swap_weights", {"path": "/new"})
    (await updating.beside(1)).set_exception(RequestError("path: not there", param="path"))
    with pytest.raises(RequestError, match="not there"):
        await swap


async def test_workers_that_cannot_be_updated_are_asked_for_nothing_else(
    updating: Updating,
) -> None:
    updating.holder.fails = {"stage": UnsupportedFeature("not with these workers")}
    with pytest.raises(UnsupportedFeature, match="not with these"):
        await updating.update(**GIVEN)
    assert updating.holder.calls == ["stage"]


async def test_preparing_packs_and_changes_nothing(updating: Updating) -> None:
    (told,) = await updating.update(**GIVEN, finish=False, prepare=True)
    assert (told["finished"], told["weights_version"]) == (False, "0")
    assert updating.holder.calls == ["stage", "seal"]
