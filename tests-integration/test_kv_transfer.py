"""Blocks of the cache that go to a store and come from one: equal outputs, less to compute."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from families import VOCAB_SIZE, save_model
from modes import SETTINGS
from safetensors.torch import load_file, save_file
from servers import RunningServer, serving
from together import together

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, PluginError, PluginNotFound
from headrace_core.kv import KVConnector

BLOCK = SETTINGS["block_size"]
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
KINDS = ("llama", "mistral", "gemma3", "gemma4", "deepseek_v3")
"""Full attention with grouped queries, a window, both in one model, both with blocks of two sizes (in two
pools), latent attention."""
Said = list[list[tuple[int, float]]]


def prompts(count: int, length: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(3, VOCAB_SIZE, (count, length), generator=generator)
    return [list(row) for row in draw.tolist()]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        save_model(kind, folder)
    return folders


@pytest.fixture
def llama(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


def transfer(connector: str, role: str = "kv_both", **changes: Any) -> dict[str, Any]:
    policy = changes.pop("kv_load_failure_policy", "recompute")
    stated = {"kv_connector": connector, "kv_role": role, "kv_load_failure_policy": policy}
    return {"kv_transfer_config": {**stated, "kv_connector_extra_config": changes}}


def files(folder: Path, role: str = "kv_both", **changes: Any) -> dict[str, Any]:
    return transfer("file", role, shared_storage_path=str(folder), **changes)


def memory(**changes: Any) -> dict[str, Any]:
    return transfer("offload", **{"cpu_bytes_to_use": 64 << 20, **changes})


@contextmanager
def engine(folder: Path, **changes: Any) -> Iterator[LLM]:
    with LLM(str(folder), **{**SETTINGS, **changes}) as model:
        yield model


def ask(model: LLM, asked: Sequence[list[int]]) -> tuple[Said, int]:
    """What is said to prompts, with log-probabilities, and how many of their tokens were computed."""
    outputs = model.generate(list(asked), PARAMS, use_tqdm=False)
    said = []
    for output in outputs:
        one = output.outputs[0]
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        said.append([(token, entry[token].logprob) for token, entry in pairs])
    computed = sum(len(p) - o.num_cached_tokens for p, o in zip(asked, outputs, strict=True))
    return said, computed


def counts(model: LLM) -> dict[str, int]:
    return dict(model.engine.stats().kv_transfer)


def is_idle(model: LLM) -> bool:
    stats = model.engine.stats()
    return stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_engine_finds_what_the_first_computed(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    asked = prompts(3, 50)
    with engine(checkpoints[kind]) as plain:
        wanted, every = ask(plain, asked)
    assert every == 150
    with engine(checkpoints[kind], **files(tmp_path, "kv_producer")) as first:
        assert ask(first, asked) == (wanted, every)
        assert counts(first)["saved_blocks"] > 0
    with engine(checkpoints[kind], **files(tmp_path, "kv_consumer")) as second:
        assert ask(second, asked) == (wanted, 6), "two tokens of each: 48 are 6 blocks"
        told = counts(second)
        assert told["hit_tokens"] == 144
        assert told["failed_blocks"] == told["saved_blocks"] == 0
        assert is_idle(second)
        # With what was said, too: those blocks were saved as they became full.
        longer = [[*p, *(t for t, _ in s), 5, 6] for p, s in zip(asked, wanted, strict=True)]
        said, computed = ask(second, longer)
        assert computed == 3 * (61 - 56)
    with engine(checkpoints[kind]) as plain:
        assert ask(plain, longer)[0] == said


MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "one by one": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "engine process": {"engine_process": True},
    "guesses": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        },
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(llama: Path, tmp_path: Path, mode: str) -> None:
    asked = prompts(5, 41)
    with engine(llama) as plain:
        wanted, _ = ask(plain, asked)
    with engine(llama, **files(tmp_path), **MODES[mode]) as first:
        assert ask(first, asked) == (wanted, 205)
    with engine(llama, **files(tmp_path), **MODES[mode]) as second:
        assert ask(second, asked) == (wanted, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_working_set_of_four_pools(checkpoints: dict[str, Path], kind: str) -> None:
    blocks = 97 if kind == "gemma3" else 24  # six cache groups
    asked, few = prompts(12, 65), {"num_gpu_blocks_override": blocks, "max_num_seqs": 2}
    with engine(checkpoints[kind], **few) as plain:
        wanted, _ = ask(plain, asked)
        said, without = ask(plain, asked)
        assert said == wanted
    with engine(checkpoints[kind], **few, **memory()) as model:
        assert ask(model, asked)[0] == wanted
        for _ in range(2):
            said, computed = ask(model, asked)
            assert said == wanted
            assert computed * 3 <= without
        assert is_idle(model)


def test_preempted_requests_take_their_blocks_back(llama: Path) -> None:
    asked = prompts(6, 40)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with engine(llama) as plain:
        wanted = [o.outputs[0].token_ids for o in plain.generate(asked, params, use_tqdm=False)]
    with engine(llama, num_gpu_blocks_override=24, max_num_seqs=6, **memory()) as model:
        with together(model, len(asked)):
            outputs = model.generate(asked, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == wanted
        assert model.engine.stats().num_preemptions > 0
        assert counts(model)["loaded_blocks"] > 0
        assert is_idle(model)


def damage(folder: Path, how: str) -> int:
    """Spoil every second file of blocks; their number."""
    paths = sorted(folder.rglob("*.kv"))[::2]
    for path in paths:
        data = path.read_bytes()
        if how == "vanished":
            path.unlink()
        else:
            path.write_bytes(data[:-9] if how == "cut" else data[:-1] + bytes([data[-1] ^ 255]))
    return len(paths)


@pytest.mark.parametrize("how", ["cut", "flipped"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_damaged_blocks_are_computed(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, how: str
) -> None:
    asked = prompts(4, 50)
    with engine(checkpoints[kind], **files(tmp_path)) as first:
        wanted, every = ask(first, asked)
    assert damage(tmp_path, how) > 3
    with engine(checkpoints[kind], **files(tmp_path)) as second:
        said, computed = ask(second, asked)
        assert said == wanted
        assert 8 < computed <= every
        assert counts(second)["failed_blocks"] > 0
        assert is_idle(second)
    with engine(checkpoints[kind], **files(tmp_path)) as third:  # what was computed was saved again
        assert ask(third, asked) == (wanted, 8)


def test_vanished_blocks_are_computed(llama: Path, tmp_path: Path) -> None:
    asked = prompts(4, 50)
    with engine(llama, **files(tmp_path)) as first:
        wanted, _ = ask(first, asked)
    damage(tmp_path, "vanished")
    with engine(llama, **files(tmp_path)) as second:
        said, computed = ask(second, asked)
        assert said == wanted
        assert computed > 8


def test_a_request_may_fail_with_its_blocks(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompts(1, 50)
    with engine(llama, **files(tmp_path)) as first:
        wanted, _ = ask(first, asked)
    damage(tmp_path, "cut")
    with engine(llama, **files(tmp_path, kv_load_failure_policy="fail")) as second:
        [output] = second.generate(asked, PARAMS, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert not output.outputs[0].token_ids
        assert "blocks could not be loaded" in caplog.text
        assert is_idle(second)
        assert ask(second, asked)[0] == wanted, "damaged files are gone, so the next one computes"


class Moody(KVConnector):
    """Has every block until it is asked for it, or until it fails."""

    def contains(self, key: bytes) -> bool:
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        into[:] = bytes([255]) * into.nbytes
        if key[0] % 2:
            raise OSError("no disk")
        return False

    def save(self, key: bytes, content: memoryview) -> None:
        raise OSError("no disk")


def test_a_connector_that_always_fails(llama: Path) -> None:
    asked = prompts(4, 50)
    with engine(llama) as plain:
        wanted = ask(plain, asked)
    stated = transfer("Moody")["kv_transfer_config"]
    stated["kv_connector_module_path"] = __name__
    with engine(llama, kv_transfer_config=stated) as model:
        assert ask(model, asked) == wanted
        assert is_idle(model)


def test_the_disk_tier_is_warm_after_a_restart(llama: Path, tmp_path: Path) -> None:
    asked, few = prompts(8, 65), {"num_gpu_blocks_override": 24, "max_num_seqs": 2}
    tiers = memory(cpu_bytes_to_use=1 << 16, disk_path=str(tmp_path), disk_bytes_to_use=64 << 20)
    with engine(llama, **few, **tiers) as first:
        wanted, every = ask(first, asked)
    with engine(llama, **few, **tiers) as second:
        said, computed = ask(second, asked)
    assert said == wanted
    assert computed == 8
    assert every == 520


def test_salts_and_other_models_share_nothing(llama: Path, tmp_path: Path) -> None:
    asked = prompts(1, 50)
    salted = [{"prompt_token_ids": asked[0], "cache_salt": "a"}]
    with engine(llama, **files(tmp_path)) as first:
        wanted, _ = ask(first, asked)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copytree(llama, other, dirs_exist_ok=True)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with engine(llama, **files(tmp_path)) as second:
        [output] = second.generate(salted, PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert ask(second, asked) == (wanted, 2)
        assert second.reset_prefix_cache()
        assert ask(second, asked) == (wanted, 50), "a reset forgets what is elsewhere, too"
    with engine(other, **files(tmp_path)) as third:
        assert ask(third, asked)[1] == 50


def test_only_what_has_a_role_is_done(llama: Path, tmp_path: Path) -> None:
    asked = prompts(1, 50)
    with engine(llama, **files(tmp_path, "kv_consumer")) as reader:
        ask(reader, asked)
        assert counts(reader)["saved_blocks"] == 0
    with engine(llama, **files(tmp_path)) as both:
        assert ask(both, asked)[1] == 50
    with engine(llama, **files(tmp_path, "kv_producer")) as writer:
        assert ask(writer, asked)[1] == 50
        assert counts(writer)["loaded_blocks"] == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_connector": "flie"}, PluginNotFound, r"'flie'.*Did you mean 'file'.*Installed: .*offload"),
        ({"kv_role": "both"}, ConfigError, r"kv_role = 'both': must be kv_producer"),
        ({"kv_role": None}, ConfigError, r"kv_role = None: must be kv_producer"),
        ({"kv_rank": 1}, ConfigError, r"kv_rank = 1: must be left out: fields are kv_connector"),
        ({"kv_ip": "::1"}, ConfigError, r"kv_ip = '::1': must be left out for this connector, which"),
        ({"kv_port": 70000}, ConfigError, r"kv_port = 70000: must be a port, 0 to 65535"),
        ({"kv_load_failure_policy": "x"}, ConfigError, r"policy = 'x': must be recompute"),
        ({"kv_connector_extra_config": 3}, ConfigError, r"extra_config = 3: must be an object"),
        ({"kv_connector_extra_config": {}}, ConfigError, r"shared_storage_path = None: must be"),
        ({"kv_connector_module_path": "json"}, PluginError, r"'json': must be a Python module"),
    ],
)  # fmt: skip
def test_refused_settings(
    llama: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    stated = {**files(tmp_path)["kv_transfer_config"], **changes}
    with pytest.raises(error, match=message):
        LLM(str(llama), **SETTINGS, kv_transfer_config=stated)


def test_memory_below_a_block_is_refused(llama: Path) -> None:
    needed = r"cpu_bytes_to_use = 100: must be at least (\d+), the bytes of a block"
    with pytest.raises(ConfigError, match=needed) as raised:
        LLM(str(llama), **SETTINGS, **memory(cpu_bytes_to_use=100))
    found = re.search(needed, str(raised.value))
    assert found is not None
    few = {"num_gpu_blocks_override": 24, "max_num_seqs": 2}
    with engine(llama, **few, **memory(cpu_bytes_to_use=int(found[1]))) as model:
        ask(model, prompts(8, 65))
        assert counts(model)["saved_blocks"], "one block at a time is kept"


def test_refused_models_and_settings(llama: Path, tmp_path: Path) -> None:
    bamba = tmp_path / "bamba"
    bamba.mkdir()
    save_model("bamba", bamba)
    with pytest.raises(ConfigError, match=r"kv_transfer_config: must be left out .* recurrent"):
        LLM(str(bamba), **SETTINGS, **memory())
    with pytest.raises(ConfigError, match=r"enable_prefix_caching = False: must be left on"):
        LLM(str(llama), **SETTINGS, enable_prefix_caching=False, **memory())


def test_decoding_behind_prompts_that_nobody_computed(llama: Path) -> None:
    asked = prompts(2, 65)
    with engine(llama, **transfer("decode-bench", "kv_consumer")) as model:
        said, computed = ask(model, asked)
        assert computed == 2
        assert [len(one) for one in said] == [9, 9]
        assert all(math.isfinite(logprob) for one in said for _, logprob in one)
    with pytest.raises(ConfigError, match="kv_role = 'kv_both': must be kv_consumer"):
        LLM(str(llama), **SETTINGS, **transfer("decode-bench"))


def completion(server: RunningServer) -> tuple[str, int]:
    """A completion's text, and how many of its prompt's tokens were cached."""
    text = "the river runs past the old mill and " * 12
    body = {"model": "headrace-demo", "prompt": text, "max_tokens": 8, "temperature": 0}
    answer = (
        httpx.post(server.api + "/completions", json=body, timeout=60).raise_for_status().json()
    )
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["text"], (details or {}).get("cached_tokens", 0)


@pytest.mark.parametrize("flags", [(), ("--engine-process",)])
def test_servers_share_a_folder(tmp_path: Path, flags: tuple[str, ...]) -> None:
    stated = json.dumps(files(tmp_path)["kv_transfer_config"])
    flags = (*flags, "--kv-transfer-config", stated, "--enable-prompt-tokens-details")
    with serving(*flags) as first:
        text, found = completion(first)
        assert found == 0
    with serving(*flags) as second:
        said, found = completion(second)
        assert said == text
        assert found > 32
        assert second.metric("kv_offload_hit_tokens_total") == found
        assert second.metric("kv_offload_loaded_bytes_total") > 0
        assert second.metric("kv_offload_failed_blocks_total") == 0
