"""The model of scaling, on machines that nobody has."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planning import scaling
from headrace.planning.machine import Machine, Placement, parse_machine, read_seconds
from headrace.planning.model_shape import QWEN3_06B, QWEN3_8B, DecoderSizes, Product
from headrace.planning.scaling import (
    ASSUMPTIONS,
    Layout,
    Overhead,
    Prediction,
    decode,
    layouts_of,
    prefill,
    table_of,
)
from headrace_core.errors import ConfigError

NODE = {
    "cores": 16, "core_read": 12e9, "node_read": 120e9, "far_core_read": 7e9, "link": 40e9,
    "core_products": 2e11, "core_few_products": 1e11,
}  # fmt: skip
"""120 GB/s are ten cores' reads."""
FULL = 12
"""Cores that fill the memory, though one of them has more pieces than another."""
FREE = Overhead(0.0)
SMALL = DecoderSizes(512, 4, 8, 4, 64, 1536, 4096)


def machine(nodes: int = 1, **changes: Any) -> Machine:
    return Machine(nodes=nodes, **{**NODE, **changes})


def without_meetings(nodes: int = 1, **changes: Any) -> Machine:
    return machine(nodes, start=0.0, line=0.0, far_line=0.0, **changes)


def of(
    sizes: DecoderSizes, machine: Machine, threads: int, batch: int = 1, **options: Any
) -> float:
    return decode(sizes.shape, machine, threads, batch, FREE, **options).seconds


# --- one node ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "nodes"), [(2, 1), (16, 1), (32, 2), (64, 4)])
def test_nothing_is_read_faster_than_memory_gives(threads: int, nodes: int) -> None:
    seconds = of(QWEN3_8B, without_meetings(nodes), threads)
    assert seconds >= QWEN3_8B.shape().weight_bytes(1) / (nodes * NODE["node_read"])


def test_decoding_stops_scaling_where_the_nodes_memory_is_full() -> None:
    node = without_meetings()
    times = {threads: of(QWEN3_8B, node, threads) for threads in (1, 2, 4, 8, FULL, 16)}
    assert times[1] / times[2] == pytest.approx(2, rel=0.05)
    assert times[1] / times[8] == pytest.approx(8, rel=0.1)
    assert times[16] == pytest.approx(times[FULL], rel=0.001)
    assert decode(QWEN3_8B.shape, node, 16, 1, FREE).binds == "memory"
    assert decode(QWEN3_8B.shape, node, 4, 1, FREE).binds == "core reads"


@pytest.mark.parametrize("sizes", [QWEN3_06B, QWEN3_8B], ids=["0.6B", "8B"])
def test_surplus_threads_slow_decoding_down(sizes: DecoderSizes) -> None:
    """The memory is full, and each further thread makes every meeting dearer."""
    node = machine(cores=64, line=1e-7)
    full = next(n for n in range(1, 65) if _only_memory(decode(sizes.shape, node, n, 1, FREE)))
    times = [of(sizes, node, threads) for threads in range(full, 65)]
    assert times == sorted(times)
    assert times[-1] > times[0]


def _only_memory(prediction: Prediction) -> bool:
    return not {"core reads", "pieces", "products"} & set(prediction.parts)


def test_a_batch_of_32_needs_more_cores_than_one_request() -> None:
    node = machine()
    one, many = (decode(QWEN3_06B.shape, node, 8, batch, FREE) for batch in (1, 32))
    assert many.parts["products"] > 0
    assert many.seconds < 32 * one.seconds  # weights are read once
    assert of(QWEN3_06B, node, 16, 32) < many.seconds


def test_a_prompt_scales_with_cores() -> None:
    times = [prefill(QWEN3_8B.shape, machine(), n, 2048, FREE) for n in (1, 2, 4, 8, 16)]
    assert all(each.binds == "products" for each in times)
    assert times[0].seconds / times[-1].seconds == pytest.approx(16, rel=0.1)


def test_a_product_of_sixteen_panels_is_divided_among_sixteen_threads() -> None:
    """Of 0.6B, two layers of a block have 1,024 outputs."""
    fast = without_meetings(cores=64, node_read=1e15)
    assert Product(1024, 3072, 1.0).pieces(64) == 16
    few, many = (decode(QWEN3_06B.shape, fast, threads, 1, FREE) for threads in (16, 64))
    assert "pieces" not in few.parts
    assert many.binds == "pieces"


def test_what_fits_the_cache_is_not_read_from_memory() -> None:
    bytes_read = SMALL.shape().weight_bytes(1) + 256 * SMALL.shape().context_bytes
    cached = without_meetings(cache=math.ceil(bytes_read), core_cache_read=4e10)
    assert of(SMALL, cached, 16) < of(SMALL, without_meetings(), 16)
    too_small = dataclasses.replace(cached, cache=math.floor(bytes_read) - 1)
    assert of(SMALL, too_small, 16) == of(SMALL, without_meetings(), 16)


def test_experts_are_read_as_tokens_choose_them() -> None:
    experts = Product(64, 64, 100.0, number=8, share=0.25)
    assert experts.reads(1) == pytest.approx(2)
    assert experts.reads(1000) == pytest.approx(8)
    shape = SMALL.shape()._replace(products=(*SMALL.shape().products, experts))
    dense = SMALL.shape()
    assert shape.weight_bytes(1) - dense.weight_bytes(1) == pytest.approx(200)
    assert shape.starts - dense.starts == 2 * shape.layers


# --- several nodes ----------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_rank_on_each_node_is_faster_than_one_writer_on_one(nodes: int) -> None:
    big = machine(nodes)
    one_writer = of(QWEN3_8B, big, 16 * nodes, weights=Placement.FIRST_NODE)
    spread = of(QWEN3_8B, big, 16 * nodes)
    ranks = of(QWEN3_8B, big, 16 * nodes, layout=Layout.RANK_PER_NODE)
    assert ranks < spread < one_writer
    # One writer's pages are read no faster than one node's memory gives.
    assert one_writer >= QWEN3_8B.shape().weight_bytes(1) / NODE["node_read"]
    assert one_writer / ranks > 0.8 * nodes


def test_a_second_node_helps_one_process_little_where_the_link_is_narrow() -> None:
    narrow, wide = without_meetings(2, link=20e9), without_meetings(2, link=1e12)
    alone = of(QWEN3_8B, narrow, 16)
    assert decode(QWEN3_8B.shape, narrow, 32, 1, FREE).binds == "link"
    assert of(QWEN3_8B, narrow, 32) > 1.4 * of(QWEN3_8B, wide, 32)
    assert alone / of(QWEN3_8B, wide, 32) > 1.7


def test_one_request_has_one_node_of_several_engines() -> None:
    pair = machine(2)
    engines = {batch: decode(QWEN3_8B.shape, pair, 32, batch, FREE, layout=Layout.ENGINE_PER_NODE)
               for batch in (1, 2, 8)}  # fmt: skip
    node = {batch: decode(QWEN3_8B.shape, machine(), 16, batch, FREE) for batch in (1, 4)}
    assert engines[1] == engines[2] == node[1]
    assert engines[8] == node[4]


def test_exchanges_are_counted_for_ranks_only() -> None:
    pair = machine(2)
    ranks = decode(QWEN3_06B.shape, pair, 32, 1, FREE, layout=Layout.RANK_PER_NODE)
    assert ranks.parts["exchange"] > scaling.PASS_SECONDS
    assert "exchange" not in decode(QWEN3_06B.shape, pair, 32, 1, FREE).parts


def test_layouts_need_as_many_threads_on_each_node() -> None:
    assert layouts_of(machine(), 16) == [Layout.ONE_PROCESS]
    assert layouts_of(machine(2), 7) == [Layout.ONE_PROCESS]
    assert layouts_of(machine(4), 8) == list(Layout)
    rows = table_of(QWEN3_06B.shape, machine(4), (1, 64), FREE, batches=(1, 8))
    assert [(row.threads, row.layout) for row in rows] == [
        (1, Layout.ONE_PROCESS), *((64, layout) for layout in Layout),
    ]  # fmt: skip
    assert rows[0].facts()["decode"]["8"]["binds"] == "core reads"


# --- what holds of every machine --------------------------------------------------------------

SPEEDS = st.floats(1e9, 1e12)
COSTS = st.floats(0, 1e-5)
MACHINES = st.builds(
    Machine, nodes=st.integers(1, 4), cores=st.integers(1, 64), core_read=SPEEDS, node_read=SPEEDS,
    far_core_read=st.just(0.0) | SPEEDS, link=SPEEDS, core_products=SPEEDS, start=COSTS, line=COSTS,
    far_line=COSTS, cache=st.sampled_from([0, 1 << 20, 1 << 24]), core_cache_read=st.just(0.0) | SPEEDS,
)  # fmt: skip
NODES_ALONE = MACHINES.map(lambda each: each.one_node())
BATCHES = st.sampled_from([1, 8, 32])


@given(MACHINES, BATCHES, st.data())
def test_a_better_machine_is_never_slower(one: Machine, batch: int, data: st.DataObject) -> None:
    threads = data.draw(st.integers(1, one.all_cores))
    layout = data.draw(st.sampled_from(layouts_of(one, threads)))
    before = of(SMALL, one, threads, batch, layout=layout)
    faster = data.draw(st.sampled_from(["core_read", "node_read", "link", "core_products"]))
    cheaper = data.draw(st.sampled_from(["start", "line", "far_line"]))
    better = dataclasses.replace(one, **{faster: 2 * getattr(one, faster), cheaper: 0.0})
    assert of(SMALL, better, threads, batch, layout=layout) <= before * (1 + 1e-9)


@given(NODES_ALONE, BATCHES, st.data())
def test_on_one_node_only_meetings_make_more_threads_slower(
    node: Machine, batch: int, data: st.DataObject
) -> None:
    fewer = data.draw(st.integers(1, node.cores))
    more = data.draw(st.integers(fewer, node.cores))
    cheap = dataclasses.replace(node, start=0.0, line=0.0, far_line=0.0)
    assert of(SMALL, cheap, more, batch) <= of(SMALL, cheap, fewer, batch) * (1 + 1e-9)
    assert node.meeting((fewer,)) <= node.meeting((more,))


@given(NODES_ALONE, st.data())
def test_threads_beyond_a_full_memory_never_help(node: Machine, data: st.DataObject) -> None:
    """Not while reading, whose time is the memory's; so not in a step either, if all of it is that."""
    num_bytes = data.draw(st.floats(1e3, 1e12))
    fewer = data.draw(st.integers(1, node.cores))
    before = read_seconds(node, num_bytes, (fewer,), Placement.LOCAL)
    if before.binds == "memory":
        more = data.draw(st.integers(fewer, node.cores))
        after = read_seconds(node, num_bytes, (more,), Placement.LOCAL)
        assert after.seconds == pytest.approx(before.seconds)


@given(MACHINES, st.floats(1e3, 1e12), st.sampled_from(Placement), st.data())
def test_reading_keeps_to_what_memory_and_cores_give(
    one: Machine, num_bytes: float, placement: Placement, data: st.DataObject
) -> None:
    by_node = one.threads_by_node(data.draw(st.integers(1, one.all_cores)))
    pieces = data.draw(st.just(math.inf) | st.integers(1, 100).map(float))
    seconds = read_seconds(one, num_bytes, by_node, placement, pieces=pieces).seconds
    fastest_core = max(one.core_read, one.far_core_read)
    used = 1 if placement is Placement.FIRST_NODE else len(by_node)
    least = max(num_bytes / (used * one.node_read), num_bytes / (sum(by_node) * fastest_core))
    assert seconds >= least * (1 - 1e-9)
    twice = read_seconds(one, 2 * num_bytes, by_node, placement, pieces=pieces).seconds
    assert twice == pytest.approx(2 * seconds)


# --- the rest ---------------------------------------------------------------------------------


def test_every_assumption_is_in_the_docstring() -> None:
    for name in ASSUMPTIONS:
        assert f"``{name}``" in (scaling.__doc__ or "")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfrom headrace.planning import machine, model_shape, scaling\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_machine_is_read_from_plain_data() -> None:
    assert parse_machine({"nodes": 2, **NODE}) == machine(2)
    assert parse_machine(machine(2).facts()) == machine(2)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"cores": 2}, "must also have core_read, node_read, core_products"),
        (
            {**NODE, "sockets": 2},
            "'sockets' is not a property of a machine; these are: nodes, cores",
        ),
        ({**NODE, "cores": 2.5}, "cores = 2.5: must be a whole number"),
        ({**NODE, "link": "40GB/s"}, "link = '40GB/s': must be a number"),
        ({**NODE, "core_read": 0}, "core_read = 0: must be above 0"),
        ({**NODE, "nodes": 0}, "nodes = 0: must be 1 to 64"),
        ({**NODE, "start": -1.0}, "start = -1.0: must be at least 0"),
    ],
)
def test_what_is_no_machine_is_refused(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_machine(facts)


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads = 17: must be 1 to 16"):
        machine().threads_by_node(17)
    assert machine(2).threads_by_node(17) == (16, 1)
