"""Engines that give each other the blocks of prompts: equal outputs, only the rest computed."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB_SIZE, save_model
from modes import SETTINGS

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError
from headrace_testing.waiting import wait_until

pytestmark = pytest.mark.days(3)

KINDS = ("llama", "gemma3", "deepseek_v3")
"""Full attention, windows beside it, latent attention."""
Said = list[list[tuple[int, float]]]
PROMPTS = [
    list(row)
    for row in torch.randint(
        3, VOCAB_SIZE, (3, 50), generator=torch.Generator().manual_seed(5)
    ).tolist()
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        save_model(kind, folder)
    return folders


@contextmanager
def engine(
    folder: Path, role: str = "", policy: str = "recompute", **changes: Any
) -> Iterator[LLM]:
    if role:
        room = changes.pop("kv_buffer_size", 1 << 24)
        changes["kv_transfer_config"] = {
            "kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_buffer_size": room,
            "kv_load_failure_policy": policy, "kv_connector_extra_config": {"fetch_timeout": 2.0},
        }  # fmt: skip
    with LLM(str(folder), **{**SETTINGS, **changes}) as model:
        yield model


def sampling(params: Any = None, max_tokens: int = 9) -> SamplingParams:
    extra = None if params is None else {"kv_transfer_params": params}
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, extra_args=extra
    )


def ask(model: LLM, asked: Sequence[list[int]], params: Any = None) -> tuple[Said, int]:
    """What is said to prompts, with log-probabilities, and how many of their tokens were computed."""
    outputs = model.generate(list(asked), sampling(params), use_tqdm=False)
    said = []
    for output in outputs:
        one = output.outputs[0]
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        said.append([(token, entry[token].logprob) for token, entry in pairs])
    return said, sum(len(p) - o.num_cached_tokens for p, o in zip(asked, outputs, strict=True))


def prefill(model: LLM, asked: Sequence[list[int]] = PROMPTS) -> dict[str, Any]:
    """``kv_transfer_params`` of an engine that has computed prompts."""
    params = sampling({"do_remote_decode": True}, max_tokens=1)
    outputs = model.generate(list(asked), params, use_tqdm=False)
    found = [output.kv_transfer_params for output in outputs]
    assert found[0] is not None
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.fixture(scope="module")
def wanted(checkpoints: dict[str, Path]) -> dict[str, Said]:
    said = {}
    for kind, folder in checkpoints.items():
        with engine(folder) as plain:
            said[kind], _ = ask(plain, PROMPTS)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_one_engine_computes_prompts_for_another(
    checkpoints: dict[str, Path], wanted: dict[str, Said], kind: str
) -> None:
    folder = checkpoints[kind]
    with engine(folder, "kv_producer") as first, engine(folder, "kv_consumer") as second:
        params = prefill(first)
        assert set(params) == {"do_remote_prefill", "do_remote_decode", "remote_host", "remote_port",
                               "remote_engine_id"}  # fmt: skip
        assert ask(second, PROMPTS, params) == (wanted[kind], 6), (
            "two tokens of each: 48 are 6 blocks"
        )
        stats = second.engine.stats()
        assert stats.kv_transfer["hit_tokens"] == 144
        assert stats.kv_transfer["failed_blocks"] == 0
        assert stats.num_free_blocks == stats.num_blocks
        assert ask(first, PROMPTS) == (wanted[kind], 6), "an engine that prefills answers as well"


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_process": True},
        {"async_scheduling": False, "enforce_eager": True},
        {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    ],
)
def test_modes(
    checkpoints: dict[str, Path], wanted: dict[str, Said], changes: dict[str, Any]
) -> None:
    folder = checkpoints["llama"]
    with (
        engine(folder, "kv_producer", **changes) as first,
        engine(folder, "kv_both", **changes) as second,
    ):
        assert ask(second, PROMPTS, prefill(first)) == (wanted["llama"], 6)


def test_another_layout_matches_nothing(
    checkpoints: dict[str, Path], wanted: dict[str, Said]
) -> None:
    folder = checkpoints["llama"]
    with (
        engine(folder, "kv_producer") as first,
        engine(folder, "kv_consumer", block_size=16) as second,
    ):
        params = prefill(first)
        assert ask(second, PROMPTS, params) == (wanted["llama"], 150)
        assert second.engine.stats().kv_transfer["failed_blocks"] == 9


def test_several_connectors_as_one(
    checkpoints: dict[str, Path], wanted: dict[str, Said], tmp_path: Path
) -> None:
    """What is in a folder is read there, the rest is fetched."""
    folder = checkpoints["llama"]

    def several(role: str) -> dict[str, Any]:
        files = {"kv_connector": "file", "kv_role": role,
                 "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}  # fmt: skip
        peers = {"kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_buffer_size": 1 << 24}
        extra = {"connectors": [files, peers]}
        return {"kv_connector": "multi", "kv_role": role, "kv_connector_extra_config": extra}

    with (
        engine(folder, kv_transfer_config=several("kv_producer")) as first,
        engine(folder, kv_transfer_config=several("kv_consumer")) as second,
    ):
        params = prefill(first)
        wait_until(lambda: len(list(tmp_path.rglob("*.kv"))) == 18, 20)
        for path in sorted(tmp_path.rglob("*.kv"))[::2]:
            path.unlink()
        assert ask(second, PROMPTS, params) == (wanted["llama"], 6)


def test_who_says_nothing_delays_nobody_else(
    checkpoints: dict[str, Path], wanted: dict[str, Said]
) -> None:
    """A request that names a peer that is silent is computed after a while; others go on meanwhile."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        engine(checkpoints["llama"], "kv_consumer") as model,
    ):
        port = silent.getsockname()[1]
        params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
        outputs = model.generate([*PROMPTS[:2]], [sampling(params), sampling()], use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert tokens == [[token for token, _ in one] for one in wanted["llama"][:2]]
        late, soon = (output.metrics.first_token_ts for output in outputs)
        assert late > soon + 1.0
        assert model.engine.stats().kv_transfer["failed_blocks"] == 6


def test_a_request_may_fail_with_its_blocks(
    checkpoints: dict[str, Path], wanted: dict[str, Said], caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoints["llama"]
    with engine(folder, "kv_producer") as first:
        params = prefill(first)
    with engine(folder, "kv_consumer", "fail") as second:
        outputs = second.generate(PROMPTS[:2], [sampling(params), sampling()], use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
        assert "6 blocks could not be loaded" in caplog.text
        stats = second.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks


def test_what_is_not_given_away_any_more_is_given_again(
    checkpoints: dict[str, Path], wanted: dict[str, Said]
) -> None:
    """The prefilling engine's cache holds more than its connector, which has room for seven blocks."""
    folder = checkpoints["llama"]
    with engine(folder, "kv_producer") as model:
        prefill(model)
        counts = model.engine.stats().kv_transfer
        size = counts["saved_bytes"] // counts["saved_blocks"]
    with (
        engine(folder, "kv_producer", kv_buffer_size=7 * size) as first,
        engine(folder, "kv_consumer") as second,
    ):
        for n in (0, 1, 0):
            params = prefill(first, PROMPTS[n : n + 1])
        assert ask(second, PROMPTS[:1], params) == (wanted["llama"][:1], 2)
        assert first.engine.stats().kv_transfer["saved_blocks"] > 12


def test_params_that_an_engine_cannot_honour(checkpoints: dict[str, Path]) -> None:
    with engine(checkpoints["llama"]) as plain:
        with pytest.raises(
            RequestError, match=r"do_remote_decode = True: .* no --kv-transfer-config"
        ):
            plain.generate(PROMPTS[0], sampling({"do_remote_decode": True}), use_tqdm=False)
        with pytest.raises(RequestError, match=r"kv_transfer_params.colour = 1: must be left out"):
            plain.generate(PROMPTS[0], sampling({"colour": 1}), use_tqdm=False)
