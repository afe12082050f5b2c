"""Weights that change on engines of several ranks: on all or on none, and as good as a fresh start."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
from families import save_model
from safetensors.torch import load_file, save_file
from servers import PATIENCE, serving
from test_weight_updates import PROMPT, SETTINGS, answer, make
from torch import Tensor
from weight_checkpoints import make_llama

from headrace import LLM
from headrace.weight_transfer import STREAMED, SharedWeights, TrainerGroup, WeightSender, described
from headrace_core.errors import RequestError
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(4)

THREADS = {**SETTINGS, "num_threads": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}
OF_RANK_1 = "model.layers.1.mlp.down_proj.weight"
"""Of the second stage."""
ANSWER = {
    "prompt": PROMPT["prompt_token_ids"], "max_tokens": 6, "temperature": 0, "ignore_eos": True,
    "return_token_ids": True, "return_weights_version": True,
}  # fmt: skip


class Ranks(NamedTuple):
    """An engine that runs, two checkpoints, and what engines that start with each say."""

    llm: LLM
    folders: Mapping[str, Path]
    said: Mapping[str, Any]

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folders[name] / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return {name: make(folder / name, seed) for seed, name in enumerate(("old", "new"), 1)}


@functools.cache
def started(folder: Path, layout: str) -> Any:
    """What an engine says that starts with these weights."""
    with LLM(str(folder), **THREADS, **LAYOUTS[layout]) as llm:
        return answer(llm)


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Ranks]:
    said = {name: started(folder, request.param) for name, folder in folders.items()}
    assert said["old"][0] != said["new"][0]
    with LLM(str(folders["old"]), **THREADS, **LAYOUTS[request.param]) as llm:
        yield Ranks(llm, folders, said)


def is_as_started_with(ranks: Ranks, name: str) -> None:
    ranks.llm.reset_prefix_cache()
    assert answer(ranks.llm) == ranks.said[name]


def test_updates_on_every_way(ranks: Ranks) -> None:
    """To the bit of a fresh start, and with nothing in the prefix cache."""
    llm, new, old = ranks.llm, ranks.weights("new"), ranks.weights("old")
    answer(llm)
    taken = llm.update_weights(new, version="process")
    assert (taken["finished"], taken["num_tensors"]) == (True, len(new))
    assert answer(llm) == ranks.said["new"]
    assert llm.weights_version == "process"
    names = sorted(old)
    with SharedWeights() as shared:
        llm.update_weights(shared.write({n: old[n] for n in names[:7]}, finish=False))
        is_as_started_with(ranks, "new")
        llm.update_weights(shared.write({n: old[n] for n in names[7:]}))
    assert answer(llm) == ranks.said["old"]
    with WeightSender(**llm.collective_rpc("open_weight_stream")[0]) as sender:
        sender.send(new)
        with pytest.raises(RequestError, match=f"{OF_RANK_1}' has shape"):
            sender.send({OF_RANK_1: new[OF_RANK_1][:3]})
    llm.update_weights(STREAMED, mode="wait")
    assert answer(llm) == ranks.said["new"]
    group = TrainerGroup(world_size=2)
    sends = threading.Thread(target=lambda: (group.wait(), group.send(old)))
    sends.start()
    llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", group.port, 1, 2))
    llm.update_weights(described(old))
    sends.join(PATIENCE)
    assert answer(llm) == ranks.said["old"]
    llm.collective_rpc("close_weight_transfer")


def test_updates_that_one_rank_refuses_change_none(ranks: Ranks) -> None:
    llm, weights = ranks.llm, ranks.weights("new")
    is_as_started_with(ranks, "old")
    with pytest.raises(RequestError, match=r"'model.layers.9.x' .* belongs to no layer"):
        llm.update_weights({**weights, "model.layers.9.x": torch.ones(3)})
    llm.update_weights({name: weights[name] for name in sorted(weights)[:5]}, finish=False)
    with pytest.raises(RequestError, match=r"down_proj.weight' .* NaN"):
        llm.update_weights({OF_RANK_1: weights[OF_RANK_1] * torch.nan})
    with pytest.raises(RequestError, match="an update of the weights is open"):
        llm.swap_weights(ranks.folders["new"])
    is_as_started_with(ranks, "old")
    with pytest.raises(RequestError, match="tensors are missing"):
        llm.update_weights()
    llm.cancel_weight_update()
    llm.update_weights({OF_RANK_1: weights[OF_RANK_1]})  # of one stage only
    llm.update_weights({OF_RANK_1: ranks.weights("old")[OF_RANK_1]})
    is_as_started_with(ranks, "old")


def test_swaps_with_probes(ranks: Ranks, tmp_path: Path) -> None:
    llm, said = ranks.llm, ranks.said
    is_as_started_with(ranks, "old")
    tokens = PROMPT["prompt_token_ids"]
    probe = [(tokens, said["new"][0])]
    told = llm.swap_weights(
        ranks.folders["new"], weights_version="new", probe=probe, max_perplexity=1e9
    )
    assert told["perplexity"] > 1
    assert told["seconds"].keys() == {"build", "drain", "switch"}
    assert answer(llm) == said["new"]
    with pytest.raises(RequestError, match=r"probe\[0\]: token 0 of its continuation is"):
        llm.swap_weights(ranks.folders["old"], probe=probe)
    weights = ranks.weights("old")
    weights[OF_RANK_1][3, 5] = torch.nan
    faulty = make(tmp_path, 1)
    save_file(weights, faulty / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"rank [01]: path = .*NaN"):
        llm.swap_weights(faulty)
    with pytest.raises(RequestError, match=r"^path: vocab_size is"):
        llm.swap_weights(make_llama(tmp_path / "other", 1))
    is_as_started_with(ranks, "new")
    assert llm.weights_version == "new"
    llm.swap_weights(ranks.folders["old"])
    assert answer(llm) == said["old"]
    llm.update_weights(ranks.weights("new"))
    assert answer(llm) == said["new"]
    llm.collective_rpc("reload_weights")
    assert answer(llm) == said["old"]


@pytest.mark.parametrize("layout", todays(LAYOUTS, days=2))
def test_integers_are_made_of_what_comes_also_after_sleep(
    layout: str, folders: dict[str, Path]
) -> None:
    settings = {**THREADS, **LAYOUTS[layout], "quantization": "int8"}
    with LLM(str(folders["new"]), **settings) as llm:
        wanted = answer(llm)
    weights = load_file(folders["new"] / "model.safetensors")
    with LLM(str(folders["old"]), **settings, enable_sleep_mode=True) as llm:
        before = answer(llm)
        llm.update_weights(weights)
        assert answer(llm) == wanted != before
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        with pytest.raises(RequestError, match="tensors are missing"):
            llm.update_weights({OF_RANK_1: weights[OF_RANK_1]})
        llm.update_weights(weights)
        llm.wake_up(tags=["kv_cache"])
        assert answer(llm) == wanted


def test_whole_experts(tmp_path: Path) -> None:
    folders = [tmp_path / "old", tmp_path / "new"]
    settings = {**THREADS, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    save_model("qwen3_moe", folders[0])
    save_model("qwen3_moe", folders[1])
    [file] = folders[1].glob("*.safetensors")
    weights = {name: -w if "experts" in name else w for name, w in load_file(str(file)).items()}
    save_file(weights, file, metadata={"format": "pt"})
    with LLM(str(folders[1]), **settings) as llm:
        wanted = answer(llm)
    with LLM(str(folders[0]), **settings) as llm:
        before = answer(llm)
        assert before != wanted
        llm.update_weights(weights)
        assert answer(llm) == wanted
        llm.swap_weights(folders[0])
        assert answer(llm) == before
        llm.swap_weights(folders[1])
        assert answer(llm) == wanted


def test_a_server_swaps_below_streams_and_takes_updates(folders: dict[str, Path]) -> None:
    """A stream that runs ends on the weights that it began with."""
    said = {name: started(folder, "tp")[0] for name, folder in folders.items()}
    flags = [
        "-tp", "2", "--num-threads", "2", "--skip-tokenizer-init", "--dtype", "float32",
        "--max-model-len", "128", "--kv-cache-memory-bytes", "4m", "--dev-mode",
    ]  # fmt: skip
    with (
        serving(str(folders["old"]), *flags) as server,
        httpx2.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):

        def post(path: str, body: Any) -> Any:
            answered = client.post(path, json=body)
            assert answered.status_code == 200, answered.text
            return answered.json()

        def now() -> tuple[list[int], list[str]]:
            found = post("/v1/completions", ANSWER)
            return found["choices"][0]["token_ids"], found["weights_versions"]

        swaps: list[Any] = []
        swap = threading.Thread(
            target=lambda: swaps.append(
                post("/swap_weights", {"path": str(folders["new"]), "weights_version": "new"})
            )
        )
        tokens: list[int] = []
        versions: list[str] = []
        body = {**ANSWER, "max_tokens": 80, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                if not swap.ident:
                    swap.start()
                event = json.loads(line[6:])
                tokens += event["choices"][0].get("token_ids") or []
                versions = event.get("weights_versions", versions)
        swap.join(PATIENCE)
        assert (tokens[:6], versions) == (said["old"], ["0"])
        assert swaps[0]["weights_version"] == "new"
        assert now() == (said["new"], ["new"])
        with SharedWeights() as shared:
            told = shared.write(load_file(folders["old"] / "model.safetensors"))
            post("/update_weights", {**told, "mode": "wait", "version": "trained"})
        assert now() == (said["old"], ["trained"])
        refused = client.post("/swap_weights", json={"path": "/nowhere"})
        assert refused.status_code == 400
        assert now() == (said["old"], ["trained"])
