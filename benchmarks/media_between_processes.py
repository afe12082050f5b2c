"""Time of a processed image on its way to the engine's process: with the request, and through shared memory.

The two ends are those of the engine (``headrace_engine.clients.wire``, ``headrace_engine.shared_objects``),
over a socket of the same kind; no model runs. The clock runs from the request in the sender's hands to the
answer that the other process has it whole.

    python benchmarks/media_between_processes.py --side 1344 --repeat 9
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import msgspec
import zmq

from headrace_core.arrays import PackedArray
from headrace_core.multimodal import MediaInput
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients.wire import Add, Attach, Command, FrameDecoder, Stop
from headrace_engine.shared_objects.items import ReceivedItems, SharedItems
from headrace_engine.shared_objects.ring_buffer import RingHandle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=1344, help="of the image, a multiple of 28")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        receive(args.receive)
        return
    request = request_with(args.side)
    size = sum(len(array.data) for array in request.media[0].inputs.values())
    print(
        f"{args.side} x {args.side}: {size / 2**20:.1f} MiB, milliseconds, median of {args.repeat}"
    )
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        for name, shared, again in (("with the request", False, False), ("shared memory, new", True, False),
                                    ("shared memory, known", True, True)):  # fmt: skip
            seconds = measured(folder, request, args.repeat, shared=shared, again=again)
            middle, least = 1e3 * statistics.median(seconds), 1e3 * min(seconds)
            print(f"{name:24}{middle:8.1f}, at best {least:.1f}")


def request_with(side: int) -> CoreRequest:
    """A request with an image as Qwen2-VL's processor makes it."""
    patches = (side // 14) ** 2
    pixels = PackedArray(
        "float32", (patches, 1176), bytes(bytearray(range(256)) * (patches * 1176 * 4 // 256))
    )
    media = MediaInput("image", {"pixel_values": pixels}, "", patches // 4, 1)
    return CoreRequest(
        request_id="r", prompt_token_ids=[1] * (patches // 4 + 2), params=SamplingParams(),
        stop_token_ids=frozenset(), max_tokens=1, arrival_time=0.0, media=[media],
    )  # fmt: skip


def measured(
    folder: str, request: CoreRequest, repeat: int, *, shared: bool, again: bool
) -> list[float]:
    context, encoder = zmq.Context(), msgspec.msgpack.Encoder()
    commands, answers = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    commands.bind(f"ipc://{folder}/commands")
    answers.bind(f"ipc://{folder}/answers")
    child = subprocess.Popen([sys.executable, __file__, "--receive", folder])
    items = SharedItems(1 << 30, 512 << 20)
    commands.send(encoder.encode(Attach(*items.handle(), items.max_object_size)))
    answers.recv()
    seconds = []
    for number in range(repeat + 2):
        name = "known" if again else f"{number}"
        one = replace(request, media=[replace(request.media[0], content_hash=name)])
        start = time.perf_counter()
        added = Add(*items.moved([one])) if shared else Add([one])
        commands.send(encoder.encode(added))
        assert answers.recv() == b"1"
        seconds.append(time.perf_counter() - start)
    commands.send(encoder.encode(Stop()))
    child.wait()
    items.close()
    context.destroy(linger=0)
    return seconds[2:]


def receive(folder: str) -> None:
    context = zmq.Context()
    commands, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(f"ipc://{folder}/commands")
    answers.connect(f"ipc://{folder}/answers")
    decoder = FrameDecoder[Command](Command)
    items = None
    while True:
        command = decoder.decode(commands.recv())
        if isinstance(command, Attach):
            handle = RingHandle(command.pid, command.descriptor, command.size)
            items = ReceivedItems(handle, command.max_object_size)
        elif isinstance(command, Add):
            assert items is not None
            requests = items.restored(command.requests, command.items)
            assert all(item.inputs for request in requests for item in request.media)
        else:
            return
        answers.send(b"1")


if __name__ == "__main__":
    main()
