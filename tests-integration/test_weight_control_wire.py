"""Sleep, updates and swaps over HTTP in orders in which they cannot go: each is refused by name, changes
nothing, and the server answers on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from safetensors.torch import load_file
from servers import PATIENCE, serving
from test_weight_updates import NORM, PROMPT, make
from transformers import Qwen2Config, Qwen2ForCausalLM

from headrace.weight_transfer import SharedWeights, WeightSender

FLAGS = (
    "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "128", "--kv-cache-memory-bytes",
    str(4 << 20), "--served-model-name", "m", "--enable-sleep-mode", "--dev-mode",
)  # fmt: skip
ASKED = {"model": "m", "prompt": PROMPT["prompt_token_ids"], "max_tokens": 6, "temperature": 0,
         "return_token_ids": True, "ignore_eos": True}  # fmt: skip


class Wire(NamedTuple):
    """A server with the old weights, and where the new ones are."""

    client: httpx2.Client
    new: Path

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        answer = self.client.post(path, json={} if body is None else body)
        return answer.status_code, answer.text

    def tokens(self) -> list[int]:
        answer = self.client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def refused(self, message: str, path: str, body: Any = None, status: int = 400) -> None:
        found, text = self.ask(path, body)
        assert found == status, text
        assert message in json.loads(text)["error"]["message"]
        assert len(text) < 4000


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    folder = tmp_path_factory.mktemp("weights")
    old, new = make(folder / "old", 1), make(folder / "new", 2)
    with (
        serving(str(old), *FLAGS) as server,
        httpx2.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield Wire(client, new)


@pytest.fixture(autouse=True)
def unchanged(wire: Wire) -> Iterator[None]:
    """Whatever was refused, answers are those of before."""
    before, version = wire.tokens(), wire.client.get("/weights_version").json()
    yield
    assert wire.tokens() == before
    assert wire.client.get("/weights_version").json() == version


def test_orders_of_sleep(wire: Wire) -> None:
    wire.refused("level = 3: must be 1 or 2", "/sleep?level=3")
    wire.refused("level", "/sleep?level=deep")
    wire.refused("must be a list of 'weights' or 'kv_cache'", "/wake_up?tags=cache")
    assert wire.ask("/wake_up")[0] == 200, "what is awake stays so"
    assert wire.ask("/sleep?level=1")[0] == 200
    assert wire.ask("/sleep?level=1")[0] == 200, "and what sleeps so"
    wire.refused("sleeps already", "/sleep?level=2")
    wire.refused("sleeps", "/v1/completions", ASKED, 503)
    wire.refused("the weights sleep", "/update_weights", {"source": "stream"})
    wire.refused("open_weight_stream: the weights sleep", "/open_weight_stream")
    wire.refused("sleeps", "/swap_weights", {"path": str(wire.new)}, 503)
    wire.refused("the weights sleep", "/collective_rpc", {"method": "reload_weights"})
    wire.refused("wake 'weights' first", "/wake_up?tags=kv_cache")
    assert wire.ask("/wake_up?tags=weights")[0] == 200
    wire.refused("sleeps already (kv_cache, level 1)", "/sleep?level=1")
    wire.refused("sleeps (kv_cache)", "/v1/completions", ASKED, 503)
    assert wire.ask("/wake_up?tags=kv_cache&tags=weights")[0] == 200


def test_sleep_with_a_request_that_runs(wire: Wire) -> None:
    long = {**ASKED, "max_tokens": 80, "stream": True}
    with wire.client.stream("POST", "/v1/completions", json=long) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        status, text = wire.ask("/sleep?level=2")
        still_runs = "must wait until no request runs: pause first" in text
        assert (status, still_runs) == (400, True), text
        count = 1 + sum(1 for _ in lines)
    assert count > 40


def test_an_open_update(wire: Wire) -> None:
    weights = load_file(wire.new / "model.safetensors")
    with SharedWeights() as shared:
        part = shared.write({NORM: weights[NORM]}, finish=False)
        assert wire.ask("/update_weights", part)[0] == 200
        wire.refused("comes twice", "/update_weights", part)
        for path, body in (
            ("/sleep?level=1", None),
            ("/swap_weights", {"path": str(wire.new)}),
            ("/collective_rpc", {"method": "reload_weights"}),
        ):
            wire.refused("an update of the weights is open (1 tensors were taken", path, body)
        assert wire.ask("/update_weights", {"cancel": True})[0] == 200
    opened = json.loads(wire.ask("/open_weight_stream")[1])
    with WeightSender(**opened) as sender:
        sender.send({"model.layers.0.self_attn.q_proj.weight": weights[
            "model.layers.0.self_attn.q_proj.weight"]})  # fmt: skip
    wire.refused("(0 tensors were taken, 1 wait)", "/sleep")
    wire.refused("are missing", "/update_weights", {"source": "stream", "mode": "abort"})
    wire.refused("(0 tensors were taken, 1 wait)", "/sleep")
    assert wire.ask("/update_weights", {"cancel": True})[0] == 200
    assert wire.ask("/close_weight_transfer")[0] == 200
    assert wire.client.get("/is_paused").json() == {"is_paused": False}


def test_text_that_is_no_name(wire: Wire) -> None:
    group = {"master_port": 1, "rank_offset": 1, "world_size": 2}
    join = "/init_weight_update_group"
    for address in ("127.0.0.1\0", "a\nb", "", "http://x", "\x1b[2J"):
        wire.refused("a host's name or address", join, {**group, "master_address": address})
    wire.refused("a port", join, {**group, "master_address": "h", "master_port": 1 << 40})
    for version in ("a\nb", "a\0", "\x1b[2J"):
        for path, key in (("/swap_weights", "weights_version"), ("/update_weights", "version")):
            body = {"path": str(wire.new)} if key == "weights_version" else {}
            wire.refused("printable characters", path, {**body, key: version})
    wire.refused("path = ", "/swap_weights", {"path": "/a\0b"})
    tensors = [{"name": f"n{i}\n", "dtype": "float32", "shape": [1]} for i in range(10_000)]
    body = {"source": "shared_memory", "shared_memory": "x", "tensors": tensors}
    wire.refused("printable characters", "/update_weights", body)
    answer = wire.client.post("/update_weights", json={f"x{i}": 1 for i in range(10_000)})
    assert (answer.status_code, len(answer.text) < 4000) == (400, True), answer.text[:4000]


def test_swaps_of_what_is_no_checkpoint(wire: Wire, tmp_path: Path) -> None:
    other = tmp_path / "qwen2"
    config = Qwen2Config(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(other)
    wire.refused("Qwen2ForCausalLM", "/swap_weights", {"path": str(other)})
    cut = shutil.copytree(wire.new, tmp_path / "cut")
    content = (cut / "model.safetensors").read_bytes()
    for size in (0, 4, 9, 100, len(content) - 1):
        (cut / "model.safetensors").write_bytes(content[:size])
        wire.refused("model.safetensors", "/swap_weights", {"path": str(cut)})
    (cut / "model.safetensors").unlink()
    os.mkfifo(cut / "model.safetensors")  # which nobody writes
    wire.refused("is a FIFO, socket or device: must be a file", "/swap_weights", {"path": str(cut)})
    (cut / "config.json").write_text("[1]")
    (cut / "model.safetensors").unlink()
    wire.refused("config.json", "/swap_weights", {"path": str(cut)})
    for name in ("/dev/zero", "/dev/null", "/proc/self/mem", str(tmp_path / "no"), str(tmp_path)):
        wire.refused("path", "/swap_weights", {"path": name})
