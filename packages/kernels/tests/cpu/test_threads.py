"""The pool: thread counts change no bit, two callers and a fork are safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headrace_core.errors import ConfigError
from headrace_core.ops import KernelNeed, QuantizedWeight
from headrace_kernels.cpu import library
from headrace_testing.ops import bits_equal, paged_case, rand
from headrace_testing.ops.optional.low_rank import Adapters
from headrace_testing.ops.weights import KINDS

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from headrace_kernels.cpu.ops import native_ops

DTYPE = "bfloat16"


@pytest.fixture(params=library.ISA_LEVELS)
def kernels(request):
    if request.param not in library.levels():
        pytest.skip(f"this machine has no {request.param}")
    kernels = library.load(request.param)
    before = kernels.num_threads()
    yield kernels
    kernels.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 3])
def test_no_thread_sleeps_through_a_job(threads):
    kernels = library.load("portable")
    before = kernels.num_threads()
    kernels.set_num_threads(threads)
    try:
        assert kernels.rendezvous(2000) == 2000
    finally:
        kernels.set_num_threads(before)


def everything(ops):
    """Results of calls that are large enough to be spread over threads."""
    x = rand(130, 300, dtype=DTYPE)
    packed = ops["linear"].pack(rand(700, 300, dtype=DTYPE))
    yield ops["linear"](x, packed)
    yield ops["linear"](x[:1], packed)
    integers = (rand(700, 300) * 40).round().clamp(-128, 127).to(torch.int8)
    weight = QuantizedWeight(integers, rand(700, 3), group_size=128)
    packed = ops["quant_linear"].pack(weight, DTYPE, activations="int8")
    yield ops["quant_linear"](x, packed)
    yield ops["quant_linear"](x[:1], packed)
    for kind in ("q4_k", "q5_1", "nf4", "fp8-128"):
        packed_kind = ops["quant_linear"].pack(
            KINDS[kind].draw(700, 300), DTYPE, activations="float"
        )
        yield ops["quant_linear"](x, packed_kind)
        yield ops["quant_linear"](x[:1], packed_kind)
        yield ops["quant_linear"].rows(torch.arange(700), packed_kind)
    yield ops["rms_norm"](rand(600, 512, dtype=DTYPE), rand(512, dtype=DTYPE), 1e-6)
    yield ops["activation_and_mul"](rand(100, 9000, dtype=DTYPE), "silu")
    moe = ops["moe"].pack(rand(8, 128, 300, dtype=DTYPE), rand(8, 300, 64, dtype=DTYPE))
    weights, ids = rand(130, 8).softmax(-1).topk(2)
    yield ops["moe"](x, moe, weights, ids, "silu")
    yield ops["moe"](x, moe, weights, ids + 1, "silu", identities=1)
    experts = ops["expert_linear"].pack(rand(8, 70, 300, dtype=DTYPE))
    yield ops["expert_linear"](x, experts, ids)
    yield ops["expert_linear"](x, experts, ids, weights)
    adapters = Adapters(300, (700, 65), 3, DTYPE, "cpu")
    for place, rank in {(0, 0): 70, (0, 1): 7, (2, 1): 64}.items():
        adapters.draw(*place, rank)
    memory, (out, x_of_rows) = adapters.written(ops["low_rank"]), adapters.rows(130)
    for chosen in (torch.arange(130).remainder(4) - 1, torch.zeros(130)):
        yield ops["low_rank"](out.clone(), x_of_rows, memory, chosen.int())
    joined = ops["quant_linear"].join([packed] * 8)
    yield ops["quant_linear"].routed(x, joined, ids)
    yield ops["quant_linear"].routed(x, joined, ids, weights)
    streams = rand(130, 4, 300, dtype=DTYPE)
    yield ops["mix"](streams, rand(130, 4, 4), streams)
    yield ops["gate"](x, rand(130, 30, dtype=DTYPE), activation="softplus")
    for options in ({}, {"sliding_window": 50}):
        case = paged_case([(1, 700), (200, 300), (1, 90)], dtype=DTYPE, **options)
        yield case.run(ops["paged_attention"])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_thread_count_changes_no_bit(kernels, count):
    ops = native_ops(kernels)
    kernels.set_num_threads(1)
    alone = list(everything(ops))
    kernels.set_num_threads(count)
    assert kernels.num_threads() == count
    for _ in range(3):
        for actual, expected in zip(everything(ops), alone, strict=True):
            assert bits_equal(actual, expected)


def cores_of_pool() -> list[set[int]]:
    """On which cores each thread of the pool may run."""
    tasks = Path("/proc/self/task").iterdir()
    ours = [t for t in tasks if (t / "comm").read_text().strip() == "headrace-kernel"]
    return [os.sched_getaffinity(int(task.name)) for task in ours]


@pytest.fixture
def portable():
    kernels = library.load("portable")
    before = kernels.num_threads()
    yield kernels
    kernels.bind_threads(())
    kernels.set_num_threads(before)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")


@on_linux
def test_bound_threads_run_on_their_cores_alone(portable):
    usable = sorted(os.sched_getaffinity(0))
    first, last = usable[0], usable[-1]
    portable.set_num_threads(4)
    portable.bind_threads((first, last, first))
    bound, unbound = [{last}, {first}], set(usable)
    assert sorted(cores_of_pool(), key=str) == sorted([*bound, unbound], key=str)
    assert portable.rendezvous(50) == 50
    portable.set_num_threads(3)  # new threads, the same cores
    assert portable.rendezvous(50) == 50
    assert sorted(cores_of_pool(), key=str) == sorted(bound, key=str)
    assert os.sched_getaffinity(0) == unbound  # the caller's own affair
    portable.bind_threads(())
    portable.rendezvous(1)
    assert cores_of_pool() == [unbound] * 2


@on_linux
def test_a_core_that_the_process_lacks_is_refused(portable):
    portable.set_num_threads(2)
    for missing in (1023, -1, 1 << 20):
        with pytest.raises(ConfigError, match=rf"cores = \(0, {missing}\)"):
            portable.bind_threads((0, missing))
    assert portable.rendezvous(50) == 50


@on_linux
def test_the_provider_binds_as_asked(portable):
    from headrace_kernels.cpu.provider import PROVIDER

    core = min(os.sched_getaffinity(0))
    PROVIDER.operations(KernelNeed("cpu", "float32", 2, (core, core)))
    assert cores_of_pool() == [{core}]
    PROVIDER.operations(KernelNeed("cpu", "float32", 2))
    portable.rendezvous(1)
    assert cores_of_pool() == [os.sched_getaffinity(0)]


@on_linux
def test_no_more_threads_than_cores_by_default():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from headrace_core.ops import KernelNeed\n"
        "from headrace_kernels.cpu.provider import PROVIDER\n"
        "library = PROVIDER.operations(KernelNeed('cpu', 'float32')).library\n"
        "assert library.num_threads() == 1, library.num_threads()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "8"}
    )


def test_two_python_threads_at_once():
    kernels = library.load(library.levels()[0])
    kernels.set_num_threads(2)
    ops = native_ops(kernels)
    x, packed = rand(64, 256, dtype=DTYPE), ops["linear"].pack(rand(512, 256, dtype=DTYPE))
    expected = ops["linear"](x, packed)
    wrong = []

    def work():
        outs = (ops["linear"](x, packed) for _ in range(150))
        wrong.extend(out for out in outs if not bits_equal(out, expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes_on():
    kernels = library.load(library.levels()[0])
    kernels.set_num_threads(2)
    linear = native_ops(kernels)["linear"]
    x, packed = rand(64, 256), linear.pack(rand(512, 256))
    expected = linear(x, packed)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hanging child must not hang the test
        os._exit(0 if torch.equal(linear(x, packed), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def page_faults_of_pool() -> list[int]:
    """Of each thread of the pool: pages that it was the first to touch, mostly."""
    stats = [(task / "stat").read_text() for task in Path("/proc/self/task").iterdir()]
    ours = [text.rpartition(")")[2].split() for text in stats if "(headrace-kernel)" in text]
    return [int(fields[7]) for fields in ours]  # minflt, the tenth field


@on_linux
def test_pages_of_a_packed_weight_are_first_written_by_all_threads(portable):
    """So that on a machine of several nodes they are not all on one; here there is one node."""
    portable.set_num_threads(2)
    portable.rendezvous(1)
    linear, weight = native_ops(portable)["linear"], torch.zeros(4096, 4096)
    before = page_faults_of_pool()
    packed = [linear.pack(weight) for _ in range(3)]  # 32 large pages each, or 16,384 small ones
    [first], [last] = before, page_faults_of_pool()
    assert last - first >= 10
    assert len(packed) == 3
