"""New weights for a running engine: as good as a fresh start with them, and refused without harm."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from servers import PATIENCE, serving
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams
from headrace.lora.request import LoRARequest
from headrace.weight_transfer import STREAMED, SharedWeights, TrainerGroup, WeightSender, described
from headrace_core.errors import RequestError
from headrace_engine.weights import broadcast
from headrace_testing.waiting import wait_until

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128,
    "kv_cache_memory_bytes": 4 << 20,
}  # fmt: skip
PROMPT = {"prompt_token_ids": list(range(1, 40))}
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=2, detokenize=False, ignore_eos=True)
QUERY, KEY = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
NORM = "model.norm.weight"


def make(folder: Path, seed: int, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2, **changes,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("old"), 1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("new"), 2)


def answer(llm: LLM, **options: Any) -> tuple[Any, ...]:
    """Tokens, the bits of log-probabilities, and the tokens that the prefix cache had."""
    output = llm.generate([PROMPT], PARAMS, **options)[0]
    bits = [{i: e.logprob.hex() for i, e in at.items()} for at in output.outputs[0].logprobs or ()]
    return output.outputs[0].token_ids, bits, output.num_cached_tokens


def fresh(folder: Path, **settings: Any) -> tuple[Any, ...]:
    with LLM(str(folder), **{**SETTINGS, **settings}) as llm:
        return answer(llm)


@pytest.mark.parametrize(
    ("quantization", "tied"),
    [
        (None, False),
        ("int8", False),
        ("int8", True),
        ("int4", False),
        ("q4_k", False),
        ("fp8", True),
    ],
)
def test_an_update_is_as_a_fresh_start(
    tmp_path: Path, quantization: str | None, tied: bool
) -> None:
    """To the bit, also where integers are made of the weights that come; nothing comes from the cache."""
    first, second = (make(tmp_path / str(seed), seed, tie_word_embeddings=tied) for seed in (1, 2))
    settings = {"quantization": quantization} if quantization else {}
    wanted = fresh(second, **settings)
    with LLM(str(first), **SETTINGS, **settings) as llm:
        before = answer(llm)
        taken = llm.update_weights(weights_of(second))
        assert taken["finished"]
        assert answer(llm) == wanted != before
        assert llm.weights_version == taken["weights_version"] == "1"
        llm.update_weights(weights_of(first), version="first")
        assert answer(llm) == before
        assert llm.generate([PROMPT], PARAMS)[0].weights_versions == ("first",)


def test_experts(tmp_path: Path) -> None:
    """Whose layers collect the states of experts, when these are packed one by one."""
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = MixtralConfig(
            vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
            max_position_embeddings=256, initializer_range=0.2,
        )  # fmt: skip
        MixtralForCausalLM(config).save_pretrained(tmp_path / str(seed))
        folders.append(tmp_path / str(seed))
    wanted = fresh(folders[1], quantization="int8")
    with LLM(str(folders[0]), **SETTINGS, quantization="int8") as llm:
        llm.update_weights(weights_of(folders[1]))
        assert answer(llm) == wanted


def test_measured_cache_scales(old: Path, new: Path) -> None:
    settings = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    wanted = fresh(new, **settings)
    with LLM(str(old), **SETTINGS, **settings) as llm:
        llm.update_weights(weights_of(new))
        assert answer(llm) == wanted


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_adapters_stay(old: Path, new: Path, tmp_path: Path, quantization: str | None) -> None:
    """They are of other layers' names, and their own is not the base's; one is replaced in its place."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    name = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"
    tensors = {name.format(i, "A"): torch.randn(4, 64) for i in range(2)}
    tensors |= {name.format(i, "B"): torch.randn(64, 4) for i in range(2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    adapter = LoRARequest("a", 1, str(tmp_path))
    settings = {**SETTINGS, "enable_lora": True}
    settings |= {"quantization": quantization} if quantization else {}
    with LLM(str(new), **settings) as llm:
        wanted = answer(llm), answer(llm, lora_request=adapter)
    with LLM(str(old), **settings) as llm:
        assert answer(llm, lora_request=adapter) != wanted[1]
        llm.update_weights(weights_of(new))
        assert (answer(llm), answer(llm, lora_request=adapter)) == wanted


@pytest.mark.parametrize("engine_process", [False, True])
def test_parts_in_any_order(old: Path, new: Path, engine_process: bool) -> None:
    """The trainer may write over a tensor once the call that brought it has returned."""
    wanted = fresh(new)
    pairs = [(name, tensor.clone()) for name, tensor in weights_of(new).items()]
    random.Random(0).shuffle(pairs)
    with LLM(str(old), **SETTINGS, engine_process=engine_process) as llm:
        before = answer(llm)[:2]
        for start in range(0, len(pairs), 3):
            taken = llm.update_weights(pairs[start : start + 3], finish=False)
            for _, tensor in pairs[start : start + 3]:
                tensor.fill_(torch.nan)
        assert taken["num_tensors"] == len(pairs)
        assert answer(llm)[:2] == before, "the old weights compute until the update finishes"
        assert llm.update_weights()["finished"]
        assert answer(llm) == wanted


def test_refused_without_harm(old: Path, new: Path) -> None:
    weights = weights_of(new)
    cases: Mapping[str, Any] = {
        "'model.layers.9.x.weight' .* belongs to no layer": {
            "model.layers.9.x.weight": weights[NORM]
        },
        r"has shape \[3\], the model needs \[64\]": {NORM: weights[NORM][:3]},
        "has dtype int32, the model needs": {NORM: weights[NORM].int()},
        "has 64 NaN of 64": {**weights, NORM: weights[NORM] * torch.nan},
        "tensors are missing: .*k_proj.weight, .*v_proj.weight": {QUERY: weights[QUERY]},
        "comes twice": [(NORM, weights[NORM]), (NORM, weights[NORM])],
        "no tensors have come": None,
        "must be a mapping of names to tensors": {NORM: 1},
    }
    with LLM(str(old), **SETTINGS) as llm:
        before = answer(llm)
        for message, given in cases.items():
            with pytest.raises(RequestError, match=message):
                llm.update_weights(given)
        with pytest.raises(RequestError, match="mode = 'now': must be None or one of keep, wait"):
            llm.update_weights(weights, mode="now")
        with pytest.raises(RequestError, match="version"):
            llm.update_weights(weights, version="")
        assert llm.weights_version == "0"
        assert answer(llm)[:2] == before[:2]
        # A part that is refused leaves the parts before it; what is cancelled is gone.
        llm.update_weights({QUERY: weights[QUERY]}, finish=False)
        with pytest.raises(RequestError, match="comes twice"):
            llm.update_weights({QUERY: weights[QUERY]}, finish=False)
        with pytest.raises(RequestError, match="are missing"):
            llm.update_weights()
        llm.cancel_weight_update()
        assert llm.update_weights(weights)["num_tensors"] == len(weights)


def test_a_packed_checkpoint_takes_its_own_tensors(tmp_path: Path) -> None:
    """And no 16-bit ones, which nothing at hand would pack as it was packed."""
    from headrace.cli.main import main

    for seed in (1, 2):
        make(tmp_path / f"whole-{seed}", seed)
        source, target = (str(tmp_path / f"{kind}-{seed}") for kind in ("whole", "packed"))
        with pytest.raises(SystemExit, match="0"):
            main(["quantize", source, "--to", "int4_g32", "--out", target])
    wanted = fresh(tmp_path / "packed-2")
    files = sorted((tmp_path / "packed-2").glob("*.safetensors"))
    packed = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert QUERY not in packed
    with LLM(str(tmp_path / "packed-1"), **SETTINGS) as llm:
        with pytest.raises(RequestError, match=r"proj.weight' .*layer's tensors are .*_packed"):
            llm.update_weights(weights_of(tmp_path / "whole-2"))
        llm.update_weights(packed)
        assert answer(llm) == wanted


@pytest.mark.parametrize(("tied", "quantization"), [(False, None), (True, None), (True, "int8")])
def test_a_model_of_transformers_code(tmp_path: Path, tied: bool, quantization: str | None) -> None:
    """Whose modules hold some of their weights themselves. A refused update leaves them."""
    first, second = (make(tmp_path / str(seed), seed, tie_word_embeddings=tied) for seed in (1, 2))
    settings = {"model_impl": "transformers", "enable_sleep_mode": True}
    settings |= {"quantization": quantization} if quantization else {}
    wanted, weights = fresh(second, **settings), weights_of(second)
    with LLM(str(first), **SETTINGS, **settings) as llm:
        before = answer(llm)
        for wrong in ({NORM: weights[NORM][:3]}, {QUERY: weights[QUERY]}):
            with pytest.raises(RequestError, match=r"the model needs|are missing"):
                llm.update_weights(
                    {"model.layers.0.input_layernorm.weight": -weights[NORM], **wrong}
                )
        assert answer(llm)[:2] == before[:2]
        llm.update_weights(weights)
        assert answer(llm) == wanted != before
        llm.update_weights(weights_of(first))
        assert answer(llm) == before
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.update_weights(weights)
        llm.wake_up(tags=["kv_cache"])
        assert answer(llm) == wanted


TRAINER = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file
from headrace.weight_transfer import SharedWeights, TrainerGroup, described

weights = load_file(Path(sys.argv[1]) / "model.safetensors")
if sys.argv[2] == "shared_memory":
    with SharedWeights() as shared:
        names = sorted(weights)
        for part in (names[:9], names[9:]):
            sys.stdin.readline()  # what was written before has been read
            more = shared.write({n: weights[n] for n in part}, finish=part == names[9:])
            print(json.dumps(more), flush=True)
        sys.stdin.read()  # until the engine has read the last part
else:
    group = TrainerGroup(world_size=2)
    print(group.port, flush=True)
    group.wait()
    print(json.dumps(described(weights)), flush=True)
    group.send(weights)
"""


@contextmanager
def trainer(folder: Path, way: str) -> Iterator[Callable[[], Any]]:
    """A second process that has the weights: gives the next thing that it says."""
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), way],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None

    def next_line() -> Any:
        child.stdin.write("\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
        return json.loads(child.stdout.readline())  # type: ignore[union-attr]

    try:
        yield next_line
    finally:
        child.stdin.close()
        child.wait(PATIENCE)
        child.stdout.close()


@pytest.mark.parametrize("engine_process", [False, True])
@pytest.mark.parametrize("way", ["shared_memory", "broadcast"])
def test_from_another_process(old: Path, new: Path, way: str, engine_process: bool) -> None:
    wanted = fresh(new)
    with LLM(str(old), **SETTINGS, engine_process=engine_process) as llm, trainer(new, way) as say:
        if way == "broadcast":
            group = {"master_address": "127.0.0.1", "master_port": say()}
            ranks = {"rank_offset": 1, "world_size": 2}
            llm.collective_rpc("init_weight_update_group", kwargs={**group, **ranks})
        taken = llm.update_weights(say())
        if not taken["finished"]:
            taken = llm.update_weights(say())
        assert taken["num_tensors"] == len(weights_of(new))
        assert answer(llm) == wanted


def test_what_others_say_of_tensors(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment and a broadcast: every number is looked at, and names before anything is received."""
    monkeypatch.setattr(broadcast, "JOIN_SECONDS", 1.0)
    weights = weights_of(new)
    with SharedWeights() as shared, LLM(str(old), **SETTINGS) as llm:
        before = answer(llm)[:2]
        good = shared.write({NORM: weights[NORM]})

        def refused(message: str, **changes: Any) -> None:
            tensor = {**good["tensors"][0], **changes.pop("tensor", {})}
            with pytest.raises(RequestError, match=message):
                llm.collective_rpc(
                    "update_weights", args=({**good, "tensors": [tensor], **changes},)
                )

        refused("beyond the segment's end", tensor={"offset": 8})
        refused("offset .* must be a number of bytes", tensor={"offset": -1})
        refused(r"shape .* must be a list of at most 8 sizes", tensor={"shape": [-1]})
        refused("must be of at most", tensor={"shape": [1 << 40, 1 << 40]})
        refused(r"has shape \[1048576\]", tensor={"shape": [1 << 20]})
        refused("dtype .* must be one of", tensor={"dtype": "object"})
        refused("belongs to no layer", tensor={"name": "x"})
        refused("must be the name of a shared", shared_memory="../shm/x")
        refused("cannot be opened", shared_memory="headrace-weights-none")
        refused("one of the fields", rebuild="torch.load")
        refused("source = 'pickle'", source="pickle")
        refused("init_weight_update_group comes first", source="broadcast")
        refused("open_weight_stream comes first", source="stream")
        refused("must be .name, torch tensor.", source="process", given=[["x", [1]]])
        with pytest.raises(RequestError, match="world_size = 1"):
            llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", 1, 1, 1))
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        with pytest.raises(RequestError, match="cannot be joined"):
            llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", port, 1, 2))
        assert answer(llm)[:2] == before


def test_a_trainer_that_goes_away(old: Path, new: Path) -> None:
    """In the middle of a broadcast: the call fails, and the engine goes on."""
    weights = weights_of(new)
    with LLM(str(old), **SETTINGS) as llm:
        before = answer(llm)[:2]
        group = TrainerGroup(world_size=2)

        def send_half() -> None:
            nonlocal group
            group.wait()
            group.send(dict(list(weights.items())[:3]))
            del group

        half = threading.Thread(target=send_half)
        half.start()
        llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", group.port, 1, 2))
        with pytest.raises(RequestError, match="did not come"):
            llm.update_weights(described(weights))
        half.join(PATIENCE)
        assert answer(llm)[:2] == before


def test_a_stream(old: Path, new: Path) -> None:
    """Parts over TCP, and everything that a stranger or a broken trainer may send."""
    weights, wanted = weights_of(new), fresh(new)
    with LLM(str(old), **SETTINGS) as llm:
        before = answer(llm)[:2]
        opened = llm.collective_rpc("open_weight_stream")[0]
        address, token = (opened["host"], opened["port"]), opened["token"].encode()
        assert opened["host"] == "127.0.0.1"

        def sent(*pieces: bytes, ends: bool = True) -> str:
            """Send bytes: what came back until the other side closed."""
            with socket.create_connection(address, timeout=PATIENCE) as connection:
                try:
                    for piece in pieces:
                        connection.sendall(piece)
                    if ends:
                        connection.shutdown(socket.SHUT_WR)
                    with connection.makefile("rb") as answers:
                        return answers.read().decode()
                except OSError:
                    return ""

        def headed(header: Any, data: bytes = b"") -> bytes:
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text + data

        norm = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}
        part = save({NORM: weights[NORM]})
        assert sent(b"0" * len(token), part) == "", "without the token nothing is said"
        assert sent(token[:-1]) == ""
        assert sent(token, part[:-1]) == "", "cut off"
        assert "must be 2 to 16777216" in sent(token, struct.pack("<Q", 2 << 30), ends=False)
        assert "must be 2 to" in sent(token, struct.pack("<Q", 2**64 - 1), ends=False)
        assert "not valid JSON" in sent(token, headed(b"[" * 100_000))
        assert "not valid JSON" in sent(token, headed(b'{"a": NaN}'))
        assert "comes twice" in sent(token, headed(b'{"a": 1, "a": 1}'))
        assert "must be an object" in sent(token, headed([1]))
        assert "must have dtype" in sent(token, headed({NORM: {**norm, "dtype": "PY"}}))
        assert "must have dtype" in sent(token, headed({NORM: {**norm, "data_offsets": [0, 1.5]}}))
        assert "data_offsets" in sent(token, headed({NORM: {**norm, "data_offsets": [8, 264]}}))
        assert "data_offsets" in sent(token, headed({NORM: {**norm, "data_offsets": [0, 9]}}))
        assert "of at most" in sent(token, headed({NORM: {**norm, "shape": [1 << 43, 1 << 43]}}))
        assert "belongs to no layer" in sent(token, headed({"x": norm}), ends=False)
        assert "the model needs [64]" in sent(
            token, headed({NORM: {**norm, "shape": [32], "data_offsets": [0, 128]}}), ends=False
        )
        assert sent(token, part) == '{"taken": 1}\n'
        with (
            pytest.raises(RequestError, match="is the token right"),
            WeightSender(opened["host"], opened["port"], "f" * len(token)) as sender,
        ):
            sender.send({NORM: weights[NORM]})
        llm.collective_rpc("update_weights", args=({**STREAMED, "finish": False},))
        llm.cancel_weight_update()
        assert answer(llm)[:2] == before
        with WeightSender(**opened) as sender:
            names = sorted(weights)
            sender.send({name: weights[name] for name in names[:7]})
            sender.send({name: weights[name] for name in names[7:]})
            with pytest.raises(RequestError, match="belongs to no layer"):
                sender.send({"x": weights[NORM]})
        llm.update_weights(STREAMED)
        assert answer(llm) == wanted
        llm.collective_rpc("close_weight_transfer")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=PATIENCE)


async def test_requests_that_run(old: Path, new: Path) -> None:
    """keep: they go on, and say both versions; wait: they end with the old weights; abort: they end now. New
    ones never get keys that old weights made."""
    args = EngineArgs(model=str(old), **SETTINGS)
    llm = AsyncLLM.from_engine_args(args)
    weights, wanted = {"old": weights_of(old), "new": weights_of(new)}, fresh(new)
    long = SamplingParams(temperature=0, max_tokens=80, detokenize=False, ignore_eos=True)

    async def run(name: str, params: SamplingParams, begun: asyncio.Event | None = None) -> Any:
        last = None
        async for output in llm.generate(PROMPT, params, name):
            last = output
            if begun is not None:
                begun.set()
        return last

    async def while_running(name: str, mode: str | None) -> Any:
        begun = asyncio.Event()
        running = asyncio.create_task(run(name, long, begun))
        await begun.wait()
        await llm.update_weights(weights["new"], mode=mode, version=name)
        return await running

    with pytest.raises(RequestError, match="must wait until no request runs"):
        await while_running("none", None)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await task
    assert await llm.weights_version() == "0"

    kept = await while_running("keep", "keep")
    assert kept.weights_versions == ("0", "keep")
    assert len(kept.outputs[0].token_ids) == 80
    assert kept.outputs[0].finish_reason == "length"
    after = await run("after", PARAMS)
    assert (after.outputs[0].token_ids, after.num_cached_tokens) == (wanted[0], 0)
    again = await run("again", PARAMS)
    assert again.outputs[0].token_ids == wanted[0]
    assert again.num_cached_tokens, "of the new weights"

    await llm.update_weights(weights["old"])
    waited = await while_running("wait", "wait")
    assert waited.weights_versions == ("1",) or waited.weights_versions == ("keep.1",)
    assert len(waited.outputs[0].token_ids) == 80
    assert (await run("after wait", PARAMS)).outputs[0].token_ids == wanted[0]

    await llm.update_weights(weights["old"])
    aborted = await while_running("abort", "abort")
    assert aborted.outputs[0].finish_reason == "abort"
    assert not await llm.is_paused()
    assert (await run("after abort", PARAMS)).weights_versions == ("abort",)

    # Paused before: it stays so, and what waits begins with the new weights.
    await llm.pause_generation()
    waiting = asyncio.create_task(run("waits", PARAMS))
    await llm.update_weights(weights["old"], mode="abort", version="paused")
    assert await llm.is_paused()
    assert not waiting.done()
    await llm.resume_generation()
    assert (await waiting).weights_versions == ("paused",)

    # Refused: generation goes on.
    with pytest.raises(RequestError, match="are missing"):
        await llm.update_weights({QUERY: weights["new"][QUERY]}, mode="abort")
    assert not await llm.is_paused()
    await llm.update_weights(weights["new"], mode="wait")
    await llm.shutdown()


@pytest.mark.parametrize("engine_process", [False, True])
def test_requests_of_other_threads(old: Path, new: Path, engine_process: bool) -> None:
    """The same of `LLM`: a thread's answer is whole and of one version, or ends."""
    weights, wanted = {"old": weights_of(old), "new": weights_of(new)}, fresh(new)
    long = SamplingParams(temperature=0, max_tokens=80, detokenize=False, ignore_eos=True)
    with LLM(str(old), **SETTINGS, engine_process=engine_process) as llm:

        def while_running(mode: str) -> Any:
            found: list[Any] = []
            many = [PROMPT] * 100
            thread = threading.Thread(target=lambda: found.extend(llm.generate(many, long)))
            thread.start()
            wait_until(lambda: llm.engine.stats().num_requests_running > 0)
            llm.update_weights(weights["new"], mode=mode, version=mode)
            after = answer(llm)
            thread.join(PATIENCE)
            assert after[:2] == wanted[:2]
            return found

        waited = while_running("wait")
        assert {o.outputs[0].finish_reason for o in waited} == {"length"}
        assert {o.weights_versions for o in waited} <= {("0",), ("wait",)}
        assert waited[0].weights_versions == ("0",)
        llm.update_weights(weights["old"], version="0")
        aborted = while_running("abort")
        assert "abort" in {o.outputs[0].finish_reason for o in aborted}
        # Those of `add_request` are computed to their end, and `step` returns them.
        llm.update_weights(weights["old"], version="0")
        llm.engine.add_request("mine", PROMPT, PARAMS)
        llm.update_weights(weights["new"], mode="wait", version="new")
        (mine,) = llm.engine.step()
        assert (mine.finished, mine.weights_versions) == (True, ("0",))
        # Refused: requests begin again.
        with pytest.raises(RequestError, match="are missing"):
            llm.update_weights({QUERY: weights["new"][QUERY]}, mode="abort")
        assert answer(llm)[:2] == wanted[:2]


def test_asleep(old: Path, new: Path) -> None:
    wanted, weights = fresh(new), weights_of(new)
    with LLM(str(old), **SETTINGS, enable_sleep_mode=True) as llm:
        before = answer(llm)
        llm.sleep(level=2)
        with pytest.raises(RequestError, match="the weights sleep"):
            llm.update_weights(weights)
        llm.wake_up(tags=["weights"])
        with pytest.raises(RequestError, match=r"tensors are missing: model\.norm\.weight"):
            llm.update_weights({name: w for name, w in weights.items() if name != NORM})
        llm.update_weights(weights)
        llm.wake_up(tags=["kv_cache"])
        assert answer(llm) == wanted
        with pytest.raises(RequestError, match="level = 1: the weights came by update_weights"):
            llm.sleep(level=1)
        version = llm.weights_version
        llm.collective_rpc("reload_weights")
        assert answer(llm) == before
        assert llm.weights_version != version
        llm.sleep(level=1)
        llm.wake_up()
        assert answer(llm) == before


def test_dummy_weights_first(old: Path) -> None:
    """Then real ones: read from the checkpoint, or given."""
    wanted = fresh(old)
    for way in ("reload", "update"):
        with LLM(str(old), **SETTINGS, load_format="dummy") as llm:
            assert answer(llm) != wanted
            if way == "reload":
                changes = {"load_config": {"load_format": "auto"}}
                llm.collective_rpc("update_config", kwargs={"changes": changes})
                llm.collective_rpc("reload_weights")
            else:
                llm.update_weights(weights_of(old))
            assert answer(llm) == wanted


class Extension:
    """Methods of a user's, for the workers."""

    def put_zeros(self, names: list[str]) -> int:
        model = self.model_runner.model  # type: ignore[attr-defined]
        assert model is self.get_model()  # type: ignore[attr-defined]
        zeros = {"model.norm.weight": (64,), "lm_head.weight": (200, 64)}
        return self.load_weights([(n, torch.zeros(zeros[n])) for n in names])  # type: ignore[attr-defined]

    def check_weights_changed(self) -> bool:
        held = dict(self.get_model().named_parameters())  # type: ignore[attr-defined]
        return not held["final_norm.weight"].any()

    def facts(self) -> list[Any]:
        config = self.model_config  # type: ignore[attr-defined]
        return [str(self.device), config.vocab_size, str(config.dtype)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine_process", [False, True])
def test_a_worker_extension(
    old: Path, engine_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    name = f"{Path(__file__).stem}:Extension"
    with LLM(str(old), **SETTINGS, worker_extension_cls=name, engine_process=engine_process) as llm:
        before = answer(llm)
        assert llm.collective_rpc("facts") == [["cpu", 200, "torch.float32"]]
        assert llm.collective_rpc("check_weights_changed") == [False]
        assert llm.collective_rpc("put_zeros", args=([NORM],)) == [1]
        assert llm.collective_rpc("check_weights_changed") == [False], "not before it finishes"
        assert llm.update_weights()["num_tensors"] == 1
        assert llm.collective_rpc("check_weights_changed") == [True]
        assert answer(llm) != before
        with pytest.raises(RequestError, match=r"must be one of report.* put_zeros"):
            llm.collective_rpc("put_ones")
        with pytest.raises(RequestError, match="by position"):
            llm.collective_rpc("put_zeros", kwargs={"names": []})


def test_over_http(old: Path, new: Path) -> None:
    weights = weights_of(new)

    def post(url: str, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            url + path, json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer secret"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    words = [str(old), "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "128"]
    words += [
        "--kv-cache-memory-bytes",
        str(4 << 20),
        "--served-model-name",
        "m",
        "--api-key",
        "secret",
    ]
    asked = {"model": "m", "prompt": PROMPT["prompt_token_ids"], "max_tokens": 6, "temperature": 0,
             "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    wanted = fresh(new)[0]
    with serving(*words, "--enable-control-routes") as server, SharedWeights() as shared:
        url = server.url
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url + "/update_weights", b"{}", timeout=PATIENCE)
        status, message = post(url, "/update_weights", shared.write({"x": weights[NORM]}))
        assert (status, "belongs to no layer" in message) == (400, True), message
        status, message = post(url, "/update_weights", {"source": "process", "given": []})
        assert status in (400, 422), message
        body = shared.write(weights, mode="wait", version="trained-1")
        assert post(url, "/update_weights", body)["weights_version"] == "trained-1"
        found = post(url, "/v1/completions", asked)["choices"][0]
        assert found["token_ids"] == list(wanted)
        with WeightSender(**post(url, "/open_weight_stream", {})) as sender:
            sender.send(weights_of(old))
        assert post(url, "/update_weights", {**STREAMED, "mode": "abort"})["finished"]
        assert post(url, "/v1/completions", asked)["choices"][0]["token_ids"] != list(wanted)
        group = TrainerGroup(world_size=2)
        sends = threading.Thread(target=lambda: (group.wait(), group.send(weights)))
        sends.start()
        at = {"master_address": group.address, "master_port": group.port}
        assert post(url, "/init_weight_update_group", at) == {}
        assert post(url, "/update_weights", described(weights))["finished"]
        sends.join(PATIENCE)
        assert post(url, "/v1/completions", asked)["choices"][0]["token_ids"] == list(wanted)
        assert post(url, "/close_weight_transfer", {}) == {}
