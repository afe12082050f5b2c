"""Connectors of the ranks of one engine: what each has, and who asks whom."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_p2p import closing, fetch, made, save

from headrace_core.errors import ConfigError
from headrace_distributed.kv_connectors.offload import OffloadConnector
from headrace_distributed.kv_connectors.p2p import fetcher
from headrace_distributed.kv_connectors.p2p.channel import ChannelError
from headrace_distributed.kv_connectors.p2p.connector import P2PConnector
from headrace_distributed.kv_connectors.p2p.messages import Welcome, pack_welcome, unpack_welcome
from headrace_distributed.kv_connectors.p2p.ranks import RankLayout
from headrace_testing.engine.kv_connectors import content_of, key_of, load


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody has now."""
    for first in range(32000, 45000, 11):
        with ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no ports are free")


def rank(number: int, num_ranks: int, role: str, port: int = 14579, **own: Any) -> P2PConnector:
    extra = {name: own.pop(name) for name in list(own) if name == "peers"}
    stated = {"kv_role": role, "kv_buffer_size": num_ranks << 20, "engine_id": "one"}
    of_engine = {"rank": number, "num_ranks": num_ranks, "block_size": 16, "kv_port": port}
    return P2PConnector({**stated, **of_engine, **own, "kv_connector_extra_config": extra})


@contextlib.contextmanager
def givers(count: int, **own: Any) -> Iterator[list[P2PConnector]]:
    with ExitStack() as stack:
        port = free_ports(count)
        yield [
            stack.enter_context(closing(rank(number, count, "kv_producer", port, **own)))
            for number in range(count)
        ]


@pytest.mark.parametrize(
    ("own", "num_ranks", "asked"),
    [
        ((0, 1), 1, [0]), ((0, 2), 2, [0]), ((1, 2), 2, [1]),
        ((0, 1), 4, [0, 1, 2, 3]), ((1, 2), 4, [2, 3]),
        ((0, 4), 2, [0]), ((1, 4), 2, [0]), ((2, 4), 2, [1]), ((3, 4), 1, [0]),
        ((0, 2), 3, [0, 1]), ((1, 2), 3, [1, 2]),
    ],
)  # fmt: skip
def test_ranks_whose_heads_overlap_are_asked(
    own: tuple[int, int], num_ranks: int, asked: list[int]
) -> None:
    assert RankLayout(*own).ranks_to_ask(RankLayout(0, num_ranks)) == asked


@pytest.mark.parametrize(
    ("own", "there", "asked"),
    [
        ({"rank": 1, "num_ranks": 2, "num_stages": 2}, {"num_ranks": 2, "num_stages": 2}, [1]),
        ({"rank": 3, "num_ranks": 4, "num_stages": 2}, {"num_ranks": 4, "num_stages": 2}, [3]),
        ({"rank": 2, "num_ranks": 4, "num_stages": 2}, {"num_ranks": 2, "num_stages": 2}, [1]),
        ({"rank": 0}, {"num_ranks": 4, "num_stages": 2}, [0, 1, 2, 3]),
        ({"rank": 1, "num_ranks": 2}, {"num_ranks": 6, "num_stages": 3}, [1, 3, 5]),
        ({"rank": 2, "num_ranks": 3, "num_stages": 3}, {"num_ranks": 2, "num_stages": 2}, [1, 0]),
        (
            {"rank": 1, "num_ranks": 2, "num_stages": 2, "by_layer": 1},
            {"num_ranks": 2, "num_stages": 2},
            [1, 0],
        ),
    ],
)
def test_stages_whose_layers_may_be_among_the_own_are_asked(
    own: dict[str, int], there: dict[str, int], asked: list[int]
) -> None:
    assert RankLayout(**own).ranks_to_ask(RankLayout(**there)) == asked


@pytest.mark.parametrize("says_how_many", [True, False])
def test_a_rank_takes_from_the_one_of_its_number(says_how_many: bool) -> None:
    with givers(2) as (first, second):
        save(first, 1, 2)
        save(second, 3, 4)
        params = dict(second.address())
        assert params == {**first.address(), "tp_size": 2}, "both say where rank 0 is"
        if not says_how_many:
            del params["tp_size"]
        with closing(rank(1, 2, "kv_consumer")) as taker:
            assert fetch(taker, params, 1, 3, 4) == [3, 4]


def test_one_rank_takes_from_several_and_several_from_one() -> None:
    with givers(2) as (first, second):
        save(first, *range(0, 280, 2))
        save(second, *range(1, 280, 2))
        address = f"127.0.0.1:{first.address()['remote_port']}"
        with closing(rank(0, 1, "kv_consumer", peers=[address], kv_head_parts=2)) as taker:
            every = list(range(280))
            assert fetch(taker, {}, *every) == every, "more than one question holds"
    with closing(rank(0, 1, "kv_producer", free_ports(1), kv_head_parts=2)) as giver:
        save(giver, 1, 2)
        for number in range(2):
            with closing(rank(number, 2, "kv_consumer")) as taker:
                assert fetch(taker, giver.address(), number + 1) == [number + 1]


def test_what_all_ranks_have_is_read_from_the_first() -> None:
    """Latent attention: every rank has the same."""
    with givers(2) as (first, second), closing(rank(0, 1, "kv_consumer")) as taker:
        save(first, 1)
        save(second, 1)
        where = first.address()
        second.close()
        assert fetch(taker, where, 1) == [1]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"block_size": 8}, "its block_size is 16, and this engine's 8: they must be equal"),
        (
            {"kv_head_parts": 4},
            "it divides blocks into 2 parts, and this engine into 4: set kv_head",
        ),
        (
            {"num_stages": 2, "kv_head_parts": 2},
            "it has 1 stages, and this engine 2: set kv_by_layer of both to true",
        ),
        ({"kv_by_layer": True}, "set kv_by_layer of both to true"),
    ],
)
def test_who_cannot_take_anything_says_why(
    own: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with givers(2) as (first, _), closing(rank(0, 2, "kv_consumer", **own)) as taker:
        save(first, 1)
        assert fetch(taker, first.address(), 2) == []
        assert told in caplog.text


def test_an_address_of_another_rank_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with givers(2) as (first, _), closing(rank(0, 2, "kv_consumer")) as taker:
        wrong = {**first.address(), "remote_port": first.address()["remote_port"] + 1}
        save(first, 1)
        assert fetch(taker, wrong, 1) == []
        assert "rank 1 of 2 is there, not rank 0" in caplog.text


def test_an_engine_that_comes_back_with_other_ranks_is_asked_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetcher, "REST_SECONDS", 0.0)
    port = free_ports(2)
    address = f"127.0.0.1:{port}"
    with closing(rank(1, 2, "kv_consumer", peers=[address])) as taker:
        with (
            closing(rank(0, 2, "kv_producer", port)),
            closing(rank(1, 2, "kv_producer", port)) as second,
        ):
            save(second, 1)
            assert fetch(taker, {}, 1) == [1]
        with closing(rank(0, 1, "kv_producer", port)) as alone:
            save(alone, 2)
            assert fetch(taker, {}, 2) == [], "it was asked where rank 1 was"
            assert fetch(taker, {}, 2) == [2]
            where = {**alone.address(), "tp_size": 2}
            named = rank(1, 2, "kv_consumer")
            with closing(named):
                assert fetch(named, where, 2) == []
            assert "it has 1 ranks, not tp_size = 2" in caplog.text


def test_one_stage_takes_from_several_and_several_from_one() -> None:
    """The ranks of a giver have other layers each; who wants all asks all."""
    each = {"kv_by_layer": True}
    with givers(2, num_stages=2, **each) as (first, second):
        save(first, *range(0, 280, 2))
        save(second, *range(1, 280, 2))
        assert first.address()["tp_size"] == 1
        with closing(rank(0, 1, "kv_consumer", **each)) as taker:
            every = list(range(280))
            assert fetch(taker, first.address(), *every) == every
        with closing(rank(2, 3, "kv_consumer", num_stages=3, **each)) as taker:
            assert fetch(taker, first.address(), 0, 1) == [0, 1]


@pytest.mark.parametrize(
    "layout", [(2, 2), (0, 0), (0, 65), (0, 2, 0, 1, 0), (0, 3, 0, 1, 2), (0, 2, 0, 1, 4)]
)
def test_impossible_ranks_are_refused(layout: tuple[int, ...]) -> None:
    packed = pack_welcome(Welcome("a", RankLayout(*layout), b"memory"))
    with pytest.raises(ChannelError, match=r"a welcome of rank"):
        unpack_welcome(packed)
    with pytest.raises(ChannelError, match="cut off"):
        unpack_welcome(packed[:8])
    good = Welcome("a", RankLayout(1, 2, 16, 4, 2, 1), b"memory")
    assert unpack_welcome(pack_welcome(good)) == good


def test_ranks_need_neighbouring_ports() -> None:
    for port in (0, 65535):
        with pytest.raises(
            ConfigError, match=rf"kv_port = {port}: must be in 1..65534 with 2 ranks"
        ):
            rank(0, 2, "kv_producer", port)


def test_memory_and_disk_are_shared_by_the_ranks(tmp_path: Path) -> None:
    def offload(number: int) -> OffloadConnector:
        extra = {"cpu_bytes_to_use": 2048, "disk_path": str(tmp_path), "disk_bytes_to_use": 1 << 20}
        own = {"rank": number, "num_ranks": 2, "kv_role": "kv_both"}
        return OffloadConnector({**own, "kv_connector_extra_config": extra})

    with closing(offload(0), offload(1)) as (first, second):
        for n in range(3):
            first.save(key_of(str(n)), memoryview(content_of(n)))
        assert len(first._blocks) == 2, "of 512 bytes, in half of the memory"
        assert not second.contains(key_of("1"))
    with closing(offload(0), offload(1)) as (first, second):
        assert load(first, key_of("1")) == content_of(1)
        assert load(second, key_of("1")) is None


def test_a_peer_of_one_rank_is_as_ever() -> None:
    with closing(made("kv_producer"), rank(1, 2, "kv_consumer")) as (giver, taker):
        save(giver, 1)
        assert "tp_size" not in giver.address()
        assert fetch(taker, giver.address(), 1) == [1]
