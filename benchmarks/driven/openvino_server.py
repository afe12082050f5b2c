"""OpenVINO GenAI behind ``/v1/completions``: ``openvino_server.py MODEL PORT CACHE_GIB``.

It brings no server. This one runs in its environment, on the standard library alone, as thin as can be, so
that what is measured is the pipeline: token ids in, an event a token out. It knows the fields that the
benchmark sends, and no others.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import queue
import sys
import threading
import time
from typing import Any

from engines import openvino_pipeline


class Loop(threading.Thread):
    """Owns the pipeline: takes requests from a queue, steps, hands tokens back to the event loop."""

    def __init__(self, pipeline: Any, events: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self.inbox: queue.Queue[tuple[list[int], Any, asyncio.Queue[list[int] | None]]] = (
            queue.Queue()
        )
        self._pipeline, self._events = pipeline, events

    def run(self) -> None:
        numpy, openvino = importlib.import_module("numpy"), importlib.import_module("openvino")
        status = importlib.import_module("openvino_genai").GenerationStatus
        live: list[tuple[Any, asyncio.Queue[list[int] | None]]] = []
        next_id = 0
        while True:
            while not live or not self.inbox.empty():
                ids, config, out = self.inbox.get()
                tensor = openvino.Tensor(numpy.array([ids], dtype="int64"))
                live.append((self._pipeline.add_request(next_id, tensor, config), out))
                next_id += 1
            self._pipeline.step()
            still = []
            for handle, out in live:
                while handle.can_read():
                    for generated in handle.read().values():
                        self._say(out, list(generated.generated_ids))
                if handle.get_status() == status.RUNNING:
                    still.append((handle, out))
                else:
                    self._say(out, None)
            live = still
            # step() keeps the interpreter's lock: without a pause nothing would be sent or received.
            time.sleep(0.001)

    def _say(self, out: asyncio.Queue[list[int] | None], item: list[int] | None) -> None:
        self._events.call_soon_threadsafe(out.put_nowait, item)


class Shim:
    """The routes."""

    def __init__(self, pipeline: Any) -> None:
        self._genai = importlib.import_module("openvino_genai")
        self._tokenizer = pipeline.get_tokenizer()
        self._loop = Loop(pipeline, asyncio.get_running_loop())
        self._loop.start()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *headers = head.decode("latin-1").split("\r\n")
                lengths = [
                    h.split(":")[1] for h in headers if h.lower().startswith("content-length:")
                ]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                await self._answer(line.split(" ")[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/completions":
            await self._complete(json.loads(body), writer)
        else:  # /health, /v1/models
            _write(writer, {"data": [{"id": "openvino", "object": "model"}]})
        await writer.drain()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = body["max_tokens"], False
        config.ignore_eos = bool(body.get("ignore_eos"))
        out: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._loop.inbox.put((body["prompt"], config, out))
        count = 0
        if body.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                         b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
        while (tokens := await out.get()) is not None:
            count += len(tokens)
            if body.get("stream"):
                text = self._tokenizer.decode(tokens)
                _event(writer, json.dumps({"choices": [{"index": 0, "text": text}]}))
        prompt = len(body["prompt"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }
        if not body.get("stream"):
            _write(writer, {"choices": [{"index": 0, "text": ""}], "usage": usage})
            return
        _event(writer, json.dumps({"choices": [], "usage": usage}))
        _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, content: str) -> None:
    data = f"data: {content}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _write(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%b" % (len(data), data))  # fmt: skip


async def main(model: str, port: str, cache_gib: str) -> None:
    shim = Shim(openvino_pipeline(model, int(cache_gib)))
    server = await asyncio.start_server(shim.serve, "127.0.0.1", int(port), limit=1 << 20)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
