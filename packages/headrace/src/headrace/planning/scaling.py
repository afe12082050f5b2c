"""What more threads and more nodes should give: a model, with every assumption in :data:`ASSUMPTIONS`.

A step is a sum over its kernels. Each takes as long as the slowest of what it needs: reading its weights,
multiplying, handing out its pieces. Then come the meetings of threads, kernels of one thread, and Python.

===============  ========================================================================================
``memory``       each weight is read once a step, at the speed of a product with one row: n cores of a
                 node read n times as fast as one, up to what the node's memory gives
``cache``        weights and keys that fit the last-level caches of the nodes in use are read from there,
                 by n cores n times as fast; nobody else uses these caches
``products``     n cores multiply n times as fast as one: no core is slower when all work. Reading and
                 multiplying overlap. Up to 32 rows go at one speed, hundreds at another
``pieces``       a product's outputs are divided in panels, of 64 with AVX-512: no more threads than
                 panels take part, and the thread with the most decides. Attention is divided as finely
                 as wanted
``starts``       each product and each layer's attention is a meeting of all threads of a process, which
                 costs more with each thread; pieces are handed out one at a time. Surplus threads do no
                 other harm
``small``        norms, rotation and the write to the cache take one thread 0.5 us, and 1/8 ns a number;
                 beyond 20 us threads share them
``python``       scheduling, inputs, sampling and outputs are one thread's Python in each step, which
                 depends on the number of requests and not on threads
``placement``    threads stay on their cores (``--cpu-bind``), and nodes are filled one after the other.
                 In one process on several nodes, weights lie on each node in the proportion of its
                 threads, and the KV cache on one, that of the thread that made it resident
``exchange``     with a rank on each node, all that it reads lies there; a sum over ranks costs two
                 meetings of ranks and its bytes over the link, and rank 0 sends each pass in 0.25 ms
``engines``      engines on different nodes disturb each other in nothing and share requests evenly; one
                 request has one node
``workload``     all requests of a batch have the same context, and none is in its prompt; a prompt is
                 one step
===============  ========================================================================================

Imports no torch: it may be asked about machines that nobody has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from headrace.planning.machine import Machine, Placement, read_seconds
from headrace.planning.model_shape import ModelShape, Product

ASSUMPTIONS: Mapping[str, str] = {
    "memory": "each weight is read once a step, at the speed of a product with one row; n cores "
    "of a node read n times as fast as one, up to what the node's memory gives",
    "cache": "weights and keys that fit the last-level caches of the nodes in use are read from "
    "there, by n cores n times as fast; nobody else uses these caches",
    "products": "n cores multiply n times as fast as one; reading and multiplying overlap; up to "
    "32 rows go at one speed, hundreds at another",
    "pieces": "a product's outputs are divided in panels, and no more threads than panels take "
    "part; attention is divided as finely as wanted",
    "starts": "each product and each layer's attention is a meeting of all threads of a process, "
    "which costs more with each thread; surplus threads do no other harm",
    "small": "norms, rotation and the write to the cache take one thread 0.5 us, and 1/8 ns a "
    "number; beyond 20 us threads share them",
    "python": "Python's part of a step depends on the number of requests and not on threads",
    "placement": "threads stay on their cores; in one process on several nodes weights lie on the "
    "nodes in proportion to its threads, and the KV cache on one",
    "exchange": "with a rank on each node (-tp) all that it reads lies there; a sum costs two "
    "meetings of ranks and its bytes over the link; a pass is sent in 0.25 ms",
    "engines": "engines on different nodes (-dp) do not disturb each other and share requests "
    "evenly",
    "workload": "all requests of a batch have the same context, and none is in its prompt; a "
    "prompt is one step",
}
"""Name -> what the model takes for granted."""
FEW_ROWS = 32
"""Rows of a product up to which its speed is ``core_few_products``."""
ROWS_PIECE = 192
"""Rows that one thread multiplies with a panel."""
PIECES_EACH = 8
"""Into which kernels divide their work for each thread, at most."""
SMALL_SECONDS = 5e-7
SMALL_NUMBER = 1.25e-10
"""Of each number in a kernel that one thread runs."""
SHARED_FROM = 2e-5
"""Seconds of work from which threads share a kernel."""
PASS_SECONDS = 2.5e-4
"""From rank 0's sending of a pass to its beginning on another rank (docs/performance.md)."""


class Overhead(NamedTuple):
    """Python's part of a step. Seconds."""

    step: float
    request: float = 0.0
    """For each request of the step."""

    def of(self, requests: int) -> float:
        return self.step + self.request * requests


class Layout(Enum):
    """How threads and nodes are used."""

    ONE_PROCESS = "one process"
    RANK_PER_NODE = "-tp, a rank a node"
    ENGINE_PER_NODE = "-dp, an engine a node"


class Prediction(NamedTuple):
    """A step's time by what it is spent on. Seconds."""

    parts: Mapping[str, float]
    """``memory``, ``link``, ``core reads``, ``products``, ``pieces``, ``starts``, ``small kernels``,
    ``exchange``, ``python``."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """What takes the most of it."""
        return max(self.parts, key=lambda name: self.parts[name])


class _Process(NamedTuple):
    """Threads of one process, and where what they read lies."""

    machine: Machine
    by_node: Sequence[int]
    weights: Placement = Placement.LOCAL
    keys: Placement = Placement.LOCAL

    @property
    def threads(self) -> int:
        return sum(self.by_node)


class _Step(NamedTuple):
    """What a step computes."""

    rows: int
    logit_rows: int
    keys: float
    """Tokens of contexts that are read from the cache."""
    pairs: float
    """Of queries and keys."""


def layouts_of(machine: Machine, threads: int) -> list[Layout]:
    """Layouts of so many threads: those with a part on each node need as many threads on each."""
    several = machine.nodes > 1 and threads % machine.nodes == 0
    return list(Layout) if several else [Layout.ONE_PROCESS]


def decode(
    shape_of: Callable[[int], ModelShape],
    machine: Machine,
    threads: int,
    batch: int,
    overhead: Overhead,
    *,
    context: int = 256,
    layout: Layout = Layout.ONE_PROCESS,
    weights: Placement = Placement.SPREAD,
) -> Prediction:
    """Time from one token of each of ``batch`` requests to the next.

    Args:
        shape_of: number of ranks -> a rank's shape.
        threads: of all processes together.
        context: tokens of each request.
        weights: where one process's weights lie.
    """
    if layout is Layout.ENGINE_PER_NODE:
        batch = math.ceil(batch / machine.nodes)
    step = _Step(batch, batch, batch * context, batch * context)
    return _predict(shape_of, machine, threads, step, overhead.of(batch), layout, weights)


def prefill(
    shape_of: Callable[[int], ModelShape],
    machine: Machine,
    threads: int,
    tokens: int,
    overhead: Overhead,
    *,
    layout: Layout = Layout.ONE_PROCESS,
    weights: Placement = Placement.SPREAD,
) -> Prediction:
    """Time of the prompt of one request; arguments as :func:`decode`'s."""
    step = _Step(tokens, 1, tokens, tokens * (tokens + 1) / 2)
    return _predict(shape_of, machine, threads, step, overhead.of(1), layout, weights)


def _predict(
    shape_of: Callable[[int], ModelShape],
    machine: Machine,
    threads: int,
    step: _Step,
    python: float,
    layout: Layout,
    weights: Placement,
) -> Prediction:
    ranks = machine.nodes if layout is Layout.RANK_PER_NODE else 1
    shape = shape_of(ranks)
    if layout is Layout.ONE_PROCESS:
        by_node = machine.threads_by_node(threads)
        process = _Process(machine, by_node, weights, Placement.FIRST_NODE)
    else:
        process = _Process(machine.one_node(), (max(1, threads // machine.nodes),))
    parts = _parts(shape, process, step)
    if ranks > 1:
        parts["exchange"] = _exchange(shape, machine, ranks, step.rows)
    parts["python"] = python
    return Prediction(parts)


def fits_caches(shape: ModelShape, machine: Machine, nodes: int, rows: int, keys: float) -> bool:
    """True if what a step reads is in the caches of so many nodes.

    Args:
        keys: tokens of contexts.
    """
    return shape.weight_bytes(rows) + keys * shape.context_bytes <= machine.cache * nodes


def _parts(shape: ModelShape, process: _Process, step: _Step) -> dict[str, float]:
    """Of one process's pass."""
    machine, nodes = process.machine, len(process.by_node)
    cached = fits_caches(shape, machine, nodes, step.rows, step.keys)
    parts: dict[str, float] = {}

    def add(what: tuple[str, float]) -> None:
        parts[what[0]] = parts.get(what[0], 0.0) + what[1]

    for product in shape.products:
        rows = step.logit_rows if product.is_head else step.rows
        add(_product(product, rows, process, cached=cached))
    add(_attention(shape, step, process, cached=cached))
    add(("starts", shape.starts * machine.meeting(process.by_node)))
    work = step.rows * shape.hidden_size * SMALL_NUMBER
    shared = work / process.threads if work > SHARED_FROM else work
    add(("small kernels", shape.small_kernels * (SMALL_SECONDS + shared)))
    return parts


def _product(product: Product, rows: int, process: _Process, *, cached: bool) -> tuple[str, float]:
    """What binds some layers' products with rows, and the time."""
    machine, threads, reads = process.machine, process.threads, product.reads(rows)
    outputs: float = product.pieces(machine.panel)
    if product.share < 1.0:  # experts' pieces are handed out together
        outputs *= max(1.0, reads)
    pieces = outputs * math.ceil(rows / ROWS_PIECE)
    reading = read_seconds(machine, product.num_bytes * reads, process.by_node, process.weights,
                           pieces=outputs, cached=cached)  # fmt: skip
    rate = machine.core_products
    if rows <= FEW_ROWS:
        rate = machine.core_few_products or rate
    multiplying = math.ceil(pieces / threads) / pieces * product.operations(rows) / rate
    handed = min(pieces, PIECES_EACH * threads) * max(1.0, reads)
    if product.share < 1.0:
        handed = pieces
    few = "pieces" if pieces < threads else ""
    names = {"memory": "memory", "link": "link", "cores": few or "core reads"}
    return max(
        (names[reading.binds], reading.seconds),
        (few or "products", multiplying),
        ("starts", handed * machine.piece(process.by_node)),
        key=lambda each: each[1],
    )


def _attention(
    shape: ModelShape, step: _Step, process: _Process, *, cached: bool
) -> tuple[str, float]:
    machine = process.machine
    reading = read_seconds(
        machine, step.keys * shape.context_bytes, process.by_node, process.keys, cached=cached
    )
    multiplying = step.pairs * shape.pair_operations / (process.threads * machine.core_products)
    name = "core reads" if reading.binds == "cores" else reading.binds
    return max((name, reading.seconds), ("products", multiplying), key=lambda each: each[1])


def _exchange(shape: ModelShape, machine: Machine, ranks: int, rows: int) -> float:
    meeting = machine.start + machine.far_line * ranks
    sent = 2 * (ranks - 1) / ranks * rows * shape.reduced_bytes
    return PASS_SECONDS + 2 * shape.reductions * meeting + sent / machine.link


class ScalingRow(NamedTuple):
    """A number of threads in one layout."""

    threads: int
    layout: Layout
    decode: Mapping[int, Prediction]
    """By the number of requests."""
    prompt: int
    """Tokens of the prompt."""
    prefill: Prediction

    def facts(self) -> dict[str, Any]:
        """Plain data; milliseconds."""
        return {
            "threads": self.threads,
            "layout": self.layout.value,
            "decode": {str(batch): _facts(each) for batch, each in self.decode.items()},
            "prompt": self.prompt,
            "prefill": _facts(self.prefill),
        }


def table_of(
    shape_of: Callable[[int], ModelShape],
    machine: Machine,
    threads: Sequence[int],
    overhead: Overhead,
    *,
    batches: Sequence[int] = (1, 8, 32),
    context: int = 256,
    prompt: int = 2048,
) -> list[ScalingRow]:
    """Every layout of each number of threads."""
    return [
        ScalingRow(
            count,
            layout,
            {
                batch: decode(
                    shape_of, machine, count, batch, overhead, context=context, layout=layout
                )
                for batch in batches
            },
            prompt,
            prefill(shape_of, machine, count, prompt, overhead, layout=layout),
        )
        for count in threads
        for layout in layouts_of(machine, count)
    ]


def _facts(prediction: Prediction) -> dict[str, Any]:
    return {
        "ms": 1e3 * prediction.seconds,
        "binds": prediction.binds,
        "parts_ms": {name: 1e3 * seconds for name, seconds in prediction.parts.items()},
    }
