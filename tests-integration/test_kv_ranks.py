"""Blocks of layers that are divided over ranks: each rank saves and loads its own heads, and a block is there
if all of its parts are."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB_SIZE, save_model
from modes import SETTINGS
from ports import free_ports
from servers import alive, children_of

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, EngineDead

pytestmark = pytest.mark.days(2)

KINDS = ("llama", "gemma3", "deepseek_v3")
"""Full attention, windows beside it, latent attention, which all ranks have whole."""
Said = list[list[tuple[int, float]]]
PROMPTS = [
    list(row)
    for row in torch.randint(
        3, VOCAB_SIZE, (3, 50), generator=torch.Generator().manual_seed(5)
    ).tolist()
]
TWO = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        save_model(kind, folder)
    return folders


@pytest.fixture
def llama(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


def transfer(connector: str, role: str = "kv_both", **own: Any) -> dict[str, Any]:
    """Settings of a connector: those that do not begin with ``kv_`` are its own."""
    outer = {name: own.pop(name) for name in list(own) if name.startswith("kv_")}
    stated = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": own}
    return {"kv_transfer_config": {**stated, **outer}}


def files(folder: Path, **own: Any) -> dict[str, Any]:
    return transfer("file", shared_storage_path=str(folder), **own)


def peers(role: str, **own: Any) -> dict[str, Any]:
    port = free_ports(2) if role == "kv_producer" else 14579
    return transfer(
        "p2p", role, kv_port=port, kv_buffer_size=1 << 24, **{"fetch_timeout": 5.0, **own}
    )


@contextmanager
def engine(folder: Path, **changes: Any) -> Iterator[LLM]:
    with LLM(str(folder), **{**SETTINGS, **changes}) as model:
        yield model


def sampling(params: Any = None, max_tokens: int = 9) -> SamplingParams:
    extra = None if params is None else {"kv_transfer_params": params}
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, extra_args=extra
    )


def ask(model: LLM, asked: Sequence[list[int]] = PROMPTS, params: Any = None) -> tuple[Said, int]:
    """What is said to prompts, with log-probabilities, and how many of their tokens were computed."""
    outputs = model.generate(list(asked), sampling(params), use_tqdm=False)
    said = []
    for output in outputs:
        one = output.outputs[0]
        pairs = zip(one.token_ids, one.logprobs, strict=True)
        said.append([(token, entry[token].logprob) for token, entry in pairs])
    return said, sum(len(p) - o.num_cached_tokens for p, o in zip(asked, outputs, strict=True))


def prefill(model: LLM) -> dict[str, Any]:
    """``kv_transfer_params`` of an engine that has computed the prompts."""
    params = sampling({"do_remote_decode": True}, max_tokens=1)
    outputs = model.generate(list(PROMPTS), params, use_tqdm=False)
    assert outputs[0].kv_transfer_params is not None
    return outputs[0].kv_transfer_params


def rank_pids() -> set[int]:
    """Processes of ranks that this one has started."""
    return {
        pid for pid in children_of(os.getpid())
        if alive(pid) and b"multiproc.rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }  # fmt: skip


def agree(said: Said, wanted: Said) -> None:
    """Equal tokens; log-probabilities that differ by the order of sums only."""
    assert [[token for token, _ in one] for one in said] == [[t for t, _ in one] for one in wanted]
    for one, other in zip(said, wanted, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)


def counts(model: LLM) -> dict[str, int]:
    return dict(model.engine.stats().kv_transfer)


def is_idle(model: LLM) -> bool:
    stats = model.engine.stats()
    return stats.num_free_blocks == stats.num_blocks


@pytest.fixture(scope="module")
def wanted(checkpoints: dict[str, Path]) -> dict[str, Said]:
    said = {}
    for kind, folder in checkpoints.items():
        with engine(folder) as plain:
            said[kind], _ = ask(plain)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_find_what_ranks_have_saved(
    checkpoints: dict[str, Path], wanted: dict[str, Said], tmp_path: Path, kind: str
) -> None:
    with engine(checkpoints[kind], **TWO, **files(tmp_path)) as first:
        said, computed = ask(first)
        agree(said, wanted[kind])
        assert computed == 150
        saved = counts(first)["saved_blocks"]
    parts = 1 if kind == "deepseek_v3" else 2
    assert len(list(tmp_path.rglob("*.kv"))) == parts * saved
    with engine(checkpoints[kind], **TWO, **files(tmp_path)) as second:
        assert ask(second) == (said, 6), "bit for bit; two tokens of each prompt: 48 are 6 blocks"
        assert counts(second)["failed_blocks"] == 0
        assert is_idle(second)


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_finds_them(
    llama: Path, wanted: dict[str, Said], tmp_path: Path, writers: int, readers: int
) -> None:
    halves = files(tmp_path, kv_head_parts=2)
    with engine(llama, tensor_parallel_size=writers, **halves) as first:
        agree(ask(first)[0], wanted["llama"])
    with engine(llama, tensor_parallel_size=readers, **halves) as second:
        said, computed = ask(second)
        agree(said, wanted["llama"])
        assert computed == 6
        assert is_idle(second)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_part_that_one_rank_cannot_load_fails_on_all(
    llama: Path, wanted: dict[str, Said], tmp_path: Path, policy: str
) -> None:
    """Every second file is cut off, whichever rank's it is; what is gone altogether is not looked for."""
    with engine(llama, **TWO, **files(tmp_path)) as first:
        ask(first)
    for path in sorted(tmp_path.rglob("*.kv"))[::2]:
        path.write_bytes(path.read_bytes()[:-9])
    with engine(llama, **TWO, **files(tmp_path, kv_load_failure_policy=policy)) as second:
        if policy == "fail":
            for output in second.generate(list(PROMPTS), sampling(), use_tqdm=False):
                assert output.outputs[0].finish_reason == "error"
        said, _ = ask(second)
        agree(said, wanted["llama"])
        assert counts(second)["failed_blocks"] > 0
        assert is_idle(second)
    for path in sorted(tmp_path.rglob("*.kv"))[::2]:
        path.unlink()
    with engine(llama, **TWO, **files(tmp_path)) as third:
        said, computed = ask(third)
        agree(said, wanted["llama"])
        assert computed > 6
        assert counts(third)["failed_blocks"] == 0


def test_memory_and_disk_of_each_rank(llama: Path, wanted: dict[str, Said], tmp_path: Path) -> None:
    few = {**TWO, "num_gpu_blocks_override": 18, "max_num_seqs": 1}
    tiers = transfer(
        "offload", cpu_bytes_to_use=64 << 20, disk_path=str(tmp_path), disk_bytes_to_use=64 << 20
    )
    with engine(llama, **few, **transfer("offload", cpu_bytes_to_use=64 << 20)) as model:
        said, _ = ask(model)
        agree(said, wanted["llama"])
        assert ask(model) == (said, 6)
    with engine(llama, **few, **tiers) as model:
        ask(model)
    assert {one.name for one in tmp_path.iterdir()} == {"rank-0-of-2", "rank-1-of-2"}
    with engine(llama, **few, **tiers) as model:
        assert ask(model) == (said, 6)


@pytest.mark.parametrize(
    ("kind", "givers", "takers"),
    [("llama", 2, 2), ("llama", 2, 1), ("llama", 1, 2), ("deepseek_v3", 2, 1), ("gemma3", 1, 2)],
)
def test_engines_give_each_other_blocks(
    checkpoints: dict[str, Path], wanted: dict[str, Said], kind: str, givers: int, takers: int
) -> None:
    folder, parts = checkpoints[kind], {} if givers == takers else {"kv_head_parts": 2}
    with (
        engine(folder, tensor_parallel_size=givers, **peers("kv_producer", **parts)) as first,
        engine(folder, tensor_parallel_size=takers, **peers("kv_consumer", **parts)) as second,
    ):
        params = prefill(first)
        assert params.get("tp_size", 1) == givers
        said, computed = ask(second, params=params)
        agree(said, wanted[kind])
        assert computed == 6
        assert counts(second)["failed_blocks"] == 0
        assert is_idle(second)


@pytest.mark.parametrize(
    ("changes", "parts", "told"),
    [
        ({"block_size": 16}, {"kv_head_parts": 2}, "its block_size is 8, and this engine's 16"),
        ({}, {}, "it divides blocks into 2 parts, and this engine into 1: set kv_head_parts"),
    ],
)
def test_engines_that_cannot_give_each_other_blocks_say_why(
    llama: Path,
    wanted: dict[str, Said],
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    parts: dict[str, Any],
    told: str,
) -> None:
    with (
        engine(llama, **TWO, **peers("kv_producer")) as first,
        engine(llama, **changes, **peers("kv_consumer", **parts)) as second,
    ):
        with caplog.at_level(logging.WARNING):
            said, computed = ask(second, params=prefill(first))
        agree(said, wanted["llama"])
        assert computed == 150
        assert told in caplog.text


def test_a_giver_whose_rank_is_killed_costs_nothing_but_work(
    llama: Path, wanted: dict[str, Said]
) -> None:
    with (
        engine(llama, **TWO, **peers("kv_consumer", fetch_timeout=2.0)) as second,
        contextlib.suppress(EngineDead),
    ):
        before = rank_pids()
        with engine(llama, **TWO, **peers("kv_producer")) as first:
            params = prefill(first)
            [rank] = rank_pids() - before
            os.kill(rank, signal.SIGKILL)
            said, computed = ask(second, params=params)
            agree(said, wanted["llama"])
            assert computed == 150, "without one rank's parts no block is there"
            assert is_idle(second)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({**TWO, "decode_context_parallel_size": 2}, "decode_context_parallel_size above 1"),
        ({"kv_head_parts": 0}, r"kv_head_parts = 0: must be parts of the heads"),
        (
            {**TWO, "kv_head_parts": 1},
            r"kv_head_parts = 1: layer .* 2 key-value heads on 2 ranks: must be one of 2",
        ),
    ],
)
def test_refused_by_name(llama: Path, tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    own = {name: value for name, value in changes.items() if name.startswith("kv_")}
    rest = {name: value for name, value in changes.items() if name not in own}
    with pytest.raises(ConfigError, match=text):
        LLM(str(llama), **SETTINGS, **rest, **files(tmp_path, **own))
