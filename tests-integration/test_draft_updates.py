"""New weights for what guesses: layers of the model's checkpoint, heads and draft models. What is guessed
afterwards is what an engine guesses that was started with them; outputs are the same bits all the time."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_heads import eagle, eagle3
from families import save_model
from modes import PARAMS, PROMPTS, SETTINGS
from mtp_heads import mtp
from safetensors.torch import load_file, save_file

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_engine.speculation.draft_model import DraftModelProposer
from headrace_engine.speculation.head import HeadProposer

pytestmark = pytest.mark.days(3)

FEW = PROMPTS[2:5]
MTP_NORM = "model.mtp_layers.0.final_layernorm.weight"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was guessed, and behind which tokens."""
    found: list[Any] = []
    for kind in (HeadProposer, DraftModelProposer):
        propose = kind.propose

        def spy(self: Any, tasks: Any, propose: Any = propose) -> Any:
            guesses = propose(self, tasks)
            found.extend((t.token_ids.tolist(), list(g)) for t, g in zip(tasks, guesses))
            return guesses

        monkeypatch.setattr(kind, "propose", spy)
    return found


class Answers:
    """Tokens and bits of log-probabilities, and what was guessed for them."""

    def __init__(self, llm: LLM, asked: list[Any]) -> None:
        asked.clear()
        outputs = [llm.generate(ids, PARAMS, use_tqdm=False)[0] for ids in FEW]
        self.bits = [
            (o.outputs[0].token_ids, [{i: e.logprob.hex() for i, e in at.items()}
                                      for at in o.outputs[0].logprobs or ()])
            for o in outputs
        ]  # fmt: skip
        self.guesses = list(asked)
        assert sum(len(guess) for _, guess in self.guesses) > 20


def negated(folder: Path, copy: Path, name: str) -> Path:
    """A copy of a checkpoint in which one tensor has the other sign."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, name: -tensors[name]}, copy / "model.safetensors", {"format": "pt"})
    return copy


def weights_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def started(folder: Path, speculative: dict[str, Any], **others: Any) -> LLM:
    settings = {"adaptive": False, "num_speculative_tokens": 3, **speculative}
    return LLM(str(folder), speculative_config=settings,
               **{**SETTINGS, "enable_prefix_caching": False, **others})  # fmt: skip


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo-")
    mtp("mimo", folder)
    return folder


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return negated(old, tmp_path_factory.mktemp("new") / "mimo-1", MTP_NORM)


class TestLayersOfTheModelsCheckpoint:
    def test_they_come_among_the_models_tensors(
        self, old: Path, new: Path, asked: list[Any]
    ) -> None:
        method = {"method": "mtp"}
        with started(new, method) as llm:
            wanted = Answers(llm, asked)
        with started(old, method) as llm:
            before = Answers(llm, asked)
            assert before.bits == wanted.bits
            assert before.guesses != wanted.guesses
            taken = llm.update_weights(weights_of(new))
            assert taken["num_tensors"] == len(weights_of(new))
            assert (llm.weights_version, Answers(llm, asked).guesses) == ("1", wanted.guesses)
            # Alone, in parts, in any order: outputs do not change, nor does their version.
            llm.update_weights({MTP_NORM: weights_of(old)[MTP_NORM]}, finish=False)
            assert Answers(llm, asked).guesses == wanted.guesses
            llm.update_weights()
            again = Answers(llm, asked)
            assert (again.guesses, again.bits) == (before.guesses, before.bits)
            assert llm.weights_version == "1"

    def test_a_fault_in_them_changes_nothing(self, old: Path, new: Path, asked: list[Any]) -> None:
        weights = weights_of(new)
        place = "model.mtp_layers.0"
        norm = "model.norm.weight"
        with started(old, {"method": "mtp"}) as llm:
            before = Answers(llm, asked)
            for message, wrong in (
                (r"final_layernorm.* has shape \[3\]", {MTP_NORM: weights[MTP_NORM][:3]}),
                ("mtp_layers.0.x.weight' .* belongs to no layer", {f"{place}.x.weight": weights[norm]}),
                ("are missing: .*k_proj", {f"{place}.self_attn.q_proj.weight":
                                           weights[f"{place}.self_attn.q_proj.weight"]}),
            ):  # fmt: skip
                with pytest.raises(RequestError, match=message):
                    llm.update_weights({norm: -weights[norm], **wrong})
            with pytest.raises(UnsupportedFeature, match="layers of the model's checkpoint: leave"):
                llm.update_weights({MTP_NORM: weights[MTP_NORM]}, target="draft")
            after = Answers(llm, asked)
            assert (after.guesses, after.bits) == (before.guesses, before.bits)

    def test_after_level_2_of_sleep(self, old: Path, new: Path, asked: list[Any]) -> None:
        """Those that an update does not bring are the checkpoint's."""
        method = {"method": "mtp"}
        with started(new, method) as llm:
            wanted = Answers(llm, asked)
        with started(old, method, enable_sleep_mode=True) as llm:
            before = Answers(llm, asked)
            for weights, expected in (
                (weights_of(new), wanted),
                ({n: t for n, t in weights_of(new).items() if "mtp" not in n}, before),
            ):
                llm.sleep(level=2)
                llm.wake_up(tags=["weights"])
                with pytest.raises(RequestError, match=r"are missing: .*model\.embed_tokens"):
                    llm.update_weights({MTP_NORM: weights_of(new)[MTP_NORM]})
                llm.update_weights(weights)
                llm.wake_up(tags=["kv_cache"])
                after = Answers(llm, asked)
                assert (after.guesses, after.bits) == (expected.guesses, expected.bits)

    def test_a_swap_without_them_is_refused_before_requests_wait(
        self, old: Path, new: Path, tmp_path: Path, asked: list[Any]
    ) -> None:
        shutil.copytree(new, tmp_path / "bad")
        tensors = {n: t for n, t in weights_of(new).items() if n != MTP_NORM}
        save_file(tensors, tmp_path / "bad" / "model.safetensors", {"format": "pt"})
        with started(old, {"method": "mtp"}) as llm:
            before = Answers(llm, asked)
            with pytest.raises(RequestError, match=r"path = .*missing.*final_layernorm"):
                llm.swap_weights(tmp_path / "bad")
            assert Answers(llm, asked).guesses == before.guesses
            llm.swap_weights(new)
            assert Answers(llm, asked).guesses != before.guesses
            llm.update_weights({MTP_NORM: weights_of(old)[MTP_NORM]})
            assert Answers(llm, asked).guesses == before.guesses


HEADS = {"eagle": (eagle, "layers.0.mlp.up_proj.weight"), "eagle3": (eagle3, "lm_head.weight")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module", params=["eagle", "eagle3", "draft_model"])
def drafts(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Method, and two checkpoints of what guesses."""
    folder = tmp_path_factory.mktemp("drafts")
    if request.param in HEADS:
        make, name = HEADS[request.param]
        make(folder / "old")
    else:
        (folder / "old").mkdir()
        save_model("qwen2", folder / "old")
        name = "model.layers.3.mlp.up_proj.weight"
    negated(folder / "old", folder / "new", name)
    return request.param, folder / "old", folder / "new"


def test_a_target_of_its_own(llama: Path, drafts: Any, asked: list[Any], tmp_path: Path) -> None:
    method, old, new = drafts
    with started(llama, {"method": method, "model": str(new)}) as llm:
        wanted = Answers(llm, asked)
    settings = {"method": method, "model": str(old)}
    with started(llama, settings, enable_sleep_mode=True) as llm:
        before = Answers(llm, asked)
        assert before.bits == wanted.bits
        assert before.guesses != wanted.guesses
        tensors = weights_of(new)
        with pytest.raises(RequestError, match="belongs to no layer"):
            llm.update_weights({"x.weight": next(iter(tensors.values()))}, target="draft")
        with pytest.raises(RequestError, match="target = 'drafts': must be one of model, draft"):
            llm.update_weights(tensors, target="drafts")
        if method == "eagle3":
            wrong = {**tensors, "d2t": tensors["d2t"] + 400}
            with pytest.raises(RequestError, match="d2t: leads to token"):
                llm.update_weights(wrong, target="draft")
        assert Answers(llm, asked).guesses == before.guesses
        llm.update_weights(tensors, target="draft")
        after = Answers(llm, asked)
        assert (after.guesses, after.bits, llm.weights_version) == (
            wanted.guesses,
            wanted.bits,
            "0",
        )
        # It stays beside other weights of the model, and goes with a reload.
        llm.update_weights(weights_of(llama))
        assert (Answers(llm, asked).guesses, llm.weights_version) == (wanted.guesses, "1")
        llm.swap_weights(shutil.copytree(llama, tmp_path / "llama-1"))
        assert Answers(llm, asked).guesses == wanted.guesses
        with pytest.raises(RequestError, match="level = 1: the weights came by update_weights"):
            llm.sleep(level=1)
        llm.collective_rpc("reload_weights")
        assert Answers(llm, asked).guesses == before.guesses
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        with pytest.raises(RequestError, match="are missing"):
            llm.update_weights(tensors, target="draft")
        llm.update_weights(tensors, target="draft", finish=False)
        llm.update_weights(weights_of(llama))
        llm.wake_up()
        after = Answers(llm, asked)
        assert (after.guesses, after.bits) == (wanted.guesses, wanted.bits)


def test_nothing_that_guesses_by_weights(llama: Path) -> None:
    with LLM(str(llama), speculative_config={"method": "suffix"}, **SETTINGS) as llm:
        with pytest.raises(UnsupportedFeature, match="nothing with weights of its own guesses"):
            llm.update_weights(weights_of(llama), target="draft")
        assert llm.update_weights(weights_of(llama))["finished"]


async def test_requests_run_meanwhile(llama: Path, drafts: Any) -> None:
    """Without a mode: they do not depend on what guesses."""
    method, old, new = drafts
    settings = {"method": method, "model": str(old), "num_speculative_tokens": 3, "adaptive": False}
    llm = AsyncLLM.from_engine_args(
        EngineArgs(model=str(llama), speculative_config=settings, **SETTINGS)
    )
    params = SamplingParams(temperature=0, max_tokens=60, detokenize=False, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": PROMPTS[2]}

    async def run(begun: asyncio.Event, name: str) -> Any:
        last = None
        async for output in llm.generate(prompt, params, name):
            begun.set()
            last = output
        return last

    expected = await run(asyncio.Event(), "before")
    begun = asyncio.Event()
    running = asyncio.create_task(run(begun, "running"))
    await begun.wait()
    await llm.update_weights(weights_of(new), target="draft")
    assert not running.done()
    output = await running
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.weights_versions == ("0",)
    await llm.shutdown()


def test_the_config_of_a_head_is_not_the_models(llama: Path, tmp_path: Path) -> None:
    """An engine in another process gets them in shared memory, with the same words."""
    eagle(tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text())["vocab_size"]
    settings = {"method": "eagle", "model": str(tmp_path / "head")}
    with started(llama, settings, engine_process=True) as llm:
        taken = llm.update_weights(weights_of(tmp_path / "head"), target="draft")
        assert taken["finished"]
        assert llm.weights_version == "0"
