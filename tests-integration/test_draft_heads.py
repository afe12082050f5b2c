"""Heads that guess by the model's hidden states, in the layouts of published checkpoints: they guess what the
papers' recurrences guess, and outputs stay the same bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch
from draft_heads import Guess, eagle, eagle3, medusa, mlp_speculator, states_of
from families import save_model
from modes import MODES, NUM_TOKENS, PARAMS, PROMPTS, SETTINGS, run
from mtp_heads import MTP_FAMILIES, mtp
from safetensors.torch import load_file, save_file
from servers import serving

from headrace import LLM, LoRARequest, SamplingParams
from headrace_core import plugins
from headrace_core.errors import ConfigError, HeadraceError, UnsupportedFeature, WeightsError
from headrace_core.speculation import ReadsStates, StepStates
from headrace_engine.speculation.head import HeadProposer
from headrace_testing.model.adapters import linear_modules, write_adapter
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

HEADS: dict[str, tuple[str, Callable[..., Guess]]] = {
    "eagle": ("eagle", eagle),
    "eagle with a bias": ("eagle", partial(eagle, bias=True)),
    "eagle, packed": ("eagle", partial(eagle, packed=True)),
    "eagle3": ("eagle3", eagle3),
    "eagle3, packed": ("eagle3", partial(eagle3, packed=True, normed=True)),
    "eagle3 with a table": ("eagle3", partial(eagle3, packed=True, own_table=True)),
    "eagle3 of other streams": ("eagle3", partial(eagle3, streams=(0, 3, 4, 1))),
    "mlp": ("mlp_speculator", mlp_speculator),
    "mlp, tied": ("mlp_speculator", partial(mlp_speculator, tied=True, scaled=True)),
    "medusa": ("medusa", medusa),
    "medusa, deeper": ("medusa", partial(medusa, blocks=2, published=False)),
}
"""Name -> method, and what makes one."""
MOST = 4


class Asked:
    """What a proposer was asked, and what it said."""

    def __init__(self) -> None:
        self.found: list[tuple[list[int], list[int]]] = []


@pytest.fixture
def asked(monkeypatch):
    spied, propose = Asked(), HeadProposer.propose

    def spy(self: HeadProposer, tasks: Any) -> Any:
        guesses = propose(self, tasks)
        spied.found += [
            (t.token_ids.tolist(), list(g)) for t, g in zip(tasks, guesses, strict=True)
        ]
        return guesses

    monkeypatch.setattr(HeadProposer, "propose", spy)
    return spied


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama-")
    model = save_model("llama", folder)
    return folder, model, run(folder, alone=True)


def config(method: str, folder: Any, **others: Any) -> dict[str, Any]:
    return {"method": method, "model": str(folder), "num_speculative_tokens": MOST,
            "adaptive": False, **others}  # fmt: skip


def check(model: Any, guess: Guess, found: list[tuple[list[int], list[int]]], least: int) -> None:
    """Each guess is what the plain recurrence guesses."""
    asked = [(ids, guesses) for ids, guesses in found if guesses]
    assert len(asked) >= least
    for ids, guesses in asked:
        assert guesses == guess(model, ids, len(guesses)), ids


@pytest.mark.parametrize("name", HEADS)
def test_guesses_are_those_of_the_plain_recurrence(name, llama, asked, tmp_path):
    folder, model, alone = llama
    method, make = HEADS[name]
    guess = make(tmp_path / "head")
    settings = config(method, tmp_path / "head")
    assert run(folder, speculative_config=settings, **MODES["no-prefix-cache"]) == alone
    check(model, guess, asked.found, 30)
    assert max(len(guesses) for _, guesses in asked.found) >= 3


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Folder and guesser of some heads, by method."""
    made = {}
    for name in ("eagle", "eagle3", "mlp_speculator", "medusa"):
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, HEADS[{"mlp_speculator": "mlp"}.get(name, name)][1](folder)
    return made


@pytest.mark.keep(12)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mlp_speculator", "medusa"])
@pytest.mark.parametrize("mode", [m for m in MODES if m != "engine-process"])
def test_every_mode_gives_the_same_bits(llama, heads, method, mode):
    folder, _, alone = llama
    settings = config(method, heads[method][0])
    assert run(folder, speculative_config=settings, **MODES[mode]) == alone


@pytest.mark.parametrize("method", todays(("eagle", "eagle3", "mlp_speculator", "medusa"), days=2))
def test_guesses_over_two_ranks(llama, heads, method, asked):
    """A head that uses the model's table or head uses what is divided."""
    folder, model, alone = llama
    head, guess = heads[method]
    settings = {"tensor_parallel_size": 2, **MODES["no-prefix-cache"]}
    found = run(folder, speculative_config=config(method, head), **settings)
    assert [[t for t, _ in one] for one in found] == [[t for t, _ in one] for one in alone]
    for one, other in zip(found, alone, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)
    check(model, guess, asked.found, 30)


@pytest.mark.parametrize("mode", ["chunked", "preempted", "eager", "simple-loop"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_guesses_do_not_depend_on_the_mode(llama, heads, method, mode, asked):
    """Chunks, requests that begin anew, steps that are not captured."""
    folder, model, alone = llama
    head, guess = heads[method]
    settings = {**MODES[mode], "enable_prefix_caching": False}
    assert run(folder, speculative_config=config(method, head), **settings) == alone
    check(model, guess, asked.found, 30)


def test_tokens_of_the_prefix_cache_have_their_entries(llama, heads, asked):
    """All prompts again, each found in the cache but for its end."""
    folder, model, alone = llama
    head, guess = heads["eagle"]
    with LLM(str(folder), speculative_config=config("eagle", head), **SETTINGS) as llm:
        for ids in PROMPTS[3:]:  # no two that go on differently behind a block
            if len(ids) != 40:
                llm.generate(ids, PARAMS, use_tqdm=False)
        asked.found.clear()
        for ids, expected in zip(PROMPTS[3:], alone[3:], strict=True):
            if len(ids) != 40:
                (output,) = llm.generate(ids, PARAMS, use_tqdm=False)
                assert output.num_cached_tokens >= len(ids) // 8 * 8 - 8 > 0
                assert output.outputs[0].token_ids == [token for token, _ in expected]
    check(model, guess, asked.found, 10)


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_layers_of_the_models_own_checkpoint(family, asked, tmp_path):
    folder = tmp_path / f"{family}-0"
    folder.mkdir()
    model, guess = mtp(family, folder)
    alone = run(folder, alone=True)
    settings = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    # Recurrent layers: after a wrong guess a step has none.
    least = 15 if family == "qwen3_next" else 30
    for mode in ("no-prefix-cache", "chunked", "preempted"):
        asked.found.clear()
        modes = {**MODES[mode], "enable_prefix_caching": False}
        assert run(folder, speculative_config=settings, **modes) == alone
        check(model, guess, asked.found, least)
    assert run(folder, speculative_config=settings, **MODES["prefix-hits"]) == alone


def test_a_swap_brings_its_own_layers(asked, tmp_path):
    """Guesses afterwards are those of an engine that began with the new checkpoint."""
    old, new = tmp_path / "mimo-0", tmp_path / "mimo-1"
    old.mkdir()
    mtp("mimo", old)
    shutil.copytree(old, new)
    name = "model.mtp_layers.0.final_layernorm.weight"
    stored = load_file(new / "model.safetensors")
    save_file({**stored, name: -stored[name]}, new / "model.safetensors", metadata={"format": "pt"})
    settings = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}

    def guesses(llm: LLM) -> list[tuple[list[int], list[int]]]:
        asked.found.clear()
        for prompt in PROMPTS[2:5]:
            llm.generate(prompt, PARAMS, use_tqdm=False)
        return list(asked.found)

    with LLM(str(new), speculative_config=settings, **SETTINGS) as llm:
        expected = guesses(llm)
    with LLM(str(old), speculative_config=settings, **SETTINGS) as llm:
        assert guesses(llm) != expected
        llm.swap_weights(new)
        assert guesses(llm) == expected


KINDS = {
    "mistral": "window",
    "gemma3": "windows and full",
    "deepseek_v3": "latent",
    "gpt2": "learned",
}


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_every_kind_of_attention(family, method, heads, tmp_path_factory, asked):
    folder = tmp_path_factory.mktemp(f"{family}-")
    model = save_model(family, folder)
    head, guess = heads[method]
    alone = run(folder, alone=True)
    for mode in ("no-prefix-cache", "chunked"):
        assert run(folder, speculative_config=config(method, head), **MODES[mode]) == alone
    assert len([guesses for _, guesses in asked.found if guesses]) > 60
    if family in ("mistral", "deepseek_v3"):  # plain embeddings, four layers
        asked.found.clear()
        run(folder, speculative_config=config(method, head), **MODES["no-prefix-cache"])
        check(model, guess, asked.found, 30)


class TestRefusals:
    """Before the model is served, by name."""

    def start(self, folder, **settings):
        LLM(str(folder), speculative_config=settings, **SETTINGS).close()

    @pytest.mark.parametrize(
        ("method", "changes", "named"),
        [
            ("eagle", {"hidden_size": 32}, r"speculative_config\.model.*reads states 32 wide.*width, 64"),
            ("eagle", {"vocab_size": 90}, r"speculative_config\.model.*vocabulary of 90.*model's, of 320"),
            ("mlp_speculator", {"emb_dim": 48}, r"reads states 48 wide \(emb_dim\)"),
            ("eagle3", {"vocab_size": 300}, r"vocabulary of 300"),
            ("eagle3", {"norm_before_fc": True}, r"norm_before_fc = True: must be False or absent"),
            ("eagle", {"layernorms": True}, r"layernorms = True: must be False or absent"),
            ("eagle", {"speculators_model_type": "dflash"}, r"speculators_model_type = 'dflash'"),
            ("eagle3", {"draft_vocab_size": 80}, r"d2t.*shape \[90\], the model needs \[80\]"),
        ],
    )  # fmt: skip
    def test_a_head_that_does_not_fit(self, method, changes, named, llama, heads, tmp_path):
        copied = tmp_path / "head"
        shutil.copytree(heads[method][0], copied)
        said = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps({**said, **changes}))
        with pytest.raises(HeadraceError, match=named):
            self.start(llama[0], **config(method, copied))

    @pytest.mark.parametrize("method", ["eagle", "eagle3", "mlp_speculator", "medusa"])
    def test_a_missing_tensor(self, method, llama, heads, tmp_path):
        copied = tmp_path / "head"
        shutil.copytree(heads[method][0], copied)
        tensors = load_file(copied / "model.safetensors")
        gone = max(tensors.keys() - {"t2d", "d2t"})
        save_file({k: t for k, t in tensors.items() if k != gone}, copied / "model.safetensors")
        with pytest.raises(WeightsError, match="tensors are missing from the checkpoint"):
            self.start(llama[0], **config(method, copied))

    def test_a_map_that_leads_out_of_the_vocabulary(self, llama, heads, tmp_path):
        copied = tmp_path / "head"
        shutil.copytree(heads["eagle3"][0], copied)
        tensors = load_file(copied / "model.safetensors")
        tensors["d2t"][-1] = 400
        save_file(tensors, copied / "model.safetensors")
        with pytest.raises(WeightsError, match="d2t: leads to token 489"):
            self.start(llama[0], **config("eagle3", copied))

    def test_a_method_that_does_not_fit_the_checkpoint(self, llama, heads):
        folder = llama[0]
        with pytest.raises(ConfigError, match=r"method = 'eagle'.*is made for 'eagle3'"):
            self.start(folder, **config("eagle", heads["eagle3"][0]))
        with pytest.raises(ConfigError, match=r"method = 'draft_model'.*is made for 'medusa'"):
            self.start(folder, **config("draft_model", heads["medusa"][0]))
        with pytest.raises(
            ConfigError, match=r"method = 'mtp': must be left out for LlamaForCausalLM"
        ):
            self.start(folder, method="mtp", num_speculative_tokens=1)
        with pytest.raises(
            ConfigError,
            match=r"'ernie_mtp': must be left out for LlamaFor.* Ernie4_5_MoeForCausalLM",
        ):
            self.start(folder, method="ernie_mtp", num_speculative_tokens=1)
        with pytest.raises(ConfigError, match=r"num_speculative_tokens = None: must be a number"):
            self.start(folder, method="eagle", model=str(heads["eagle"][0]))

    def test_a_model_without_such_layers(self, tmp_path):
        save_model("deepseek_v3", tmp_path)
        with pytest.raises(WeightsError, match=r"missing.*model\.layers\.4\.enorm"):
            self.start(tmp_path, method="deepseek_mtp")
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "num_nextn_predict_layers": 0}))
        with pytest.raises(ConfigError, match=r"num_nextn_predict_layers = 0.*at least 1"):
            self.start(tmp_path, method="deepseek_mtp")


def test_over_http(llama, heads):
    """A server of a real process, by its command line."""
    folder, _, alone = llama
    speculative = json.dumps(config("eagle3", heads["eagle3"][0]))
    arguments = ["--model", str(folder), "--dtype", "float32", "--max-model-len", "128",
                 "--skip-tokenizer-init", "--speculative-config", speculative]  # fmt: skip
    with serving(*arguments) as server:
        body = {"model": str(folder), "prompt": PROMPTS[2], "max_tokens": NUM_TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        answer = httpx.post(f"{server.api}/completions", json=body, timeout=60).json()
        drafts = server.metric("spec_decode_num_draft_tokens_total")
    assert answer["choices"][0]["token_ids"] == [token for token, _ in alone[2]]
    assert drafts > 0


def test_a_checkpoint_says_its_method_and_number(llama, tmp_path):
    folder, _, alone = llama
    mlp_speculator(tmp_path / "mlp")
    eagle3(tmp_path / "eagle3", packed=True)
    for name, number in (("mlp", 3), ("eagle3", 3)):
        with LLM(
            str(folder),
            speculative_config={"model": str(tmp_path / name), "adaptive": False},
            **SETTINGS,
        ) as llm:
            (output,) = llm.generate(PROMPTS[2], PARAMS, use_tqdm=False)
            stats = llm.engine.stats()
        assert output.outputs[0].token_ids == [token for token, _ in alone[2]]
        assert len(stats.num_accepted_per_position) == number


def test_a_packed_head_brings_its_model(llama, tmp_path):
    folder, _, alone = llama
    eagle3(tmp_path / "head", packed=True, verifier=str(folder))
    with LLM(str(tmp_path / "head"), **SETTINGS) as llm:
        (output,) = llm.generate(PROMPTS[2], PARAMS, use_tqdm=False)
        assert llm.engine.stats().num_draft_tokens > 0
    assert output.outputs[0].token_ids == [token for token, _ in alone[2]]
    eagle3(tmp_path / "nameless", packed=True, verifier="")
    with pytest.raises(ConfigError, match=r"is a head, whose config\.json names no .*verifier"):
        LLM(str(tmp_path / "nameless"), **SETTINGS)


@pytest.mark.parametrize("level", [1, 2])
def test_a_head_sleeps_with_its_model(llama, heads, asked, level):
    folder, model, alone = llama
    head, guess = heads["eagle"]
    settings = {**SETTINGS, "enable_sleep_mode": True, "enable_prefix_caching": False}
    with LLM(str(folder), speculative_config=config("eagle", head), **settings) as llm:
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [[t for t, _ in pairs] for pairs in alone]
    check(model, guess, asked.found, 30)


def test_adapters_beside_guesses(llama, heads, tmp_path):
    """Requests with an adapter, of all layers and the head, and without one."""
    folder, model, _ = llama
    targets = ("q_proj", "v_proj", "down_proj", "lm_head")
    modules = {n: size for n, size in linear_modules(model).items() if n.endswith(targets)}
    write_adapter(tmp_path / "adapter", modules, rank=4, seed=1)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    requests = [adapter if number % 2 else None for number in range(len(PROMPTS))]

    def outputs(**settings: Any) -> Any:
        with LLM(str(folder), enable_lora=True, **settings, **SETTINGS) as llm:
            found = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=requests)
        return [(o.outputs[0].token_ids, [list(map(repr, e.values())) for e in o.outputs[0].logprobs])
                for o in found]  # fmt: skip

    plain = outputs()
    for method in ("eagle", "eagle3", "medusa"):
        assert outputs(speculative_config=config(method, heads[method][0])) == plain


@pytest.mark.parametrize("method", ["eagle", "mlp_speculator"])
def test_samples_are_the_same_tokens(method, llama, heads):
    folder = llama[0]
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=16, logprobs=1,
                            prompt_logprobs=1, ignore_eos=True, n=2)  # fmt: skip

    def outputs(**settings: Any) -> Any:
        with LLM(str(folder), **settings, **SETTINGS) as llm:
            found = llm.generate(PROMPTS, params, use_tqdm=False)
        return [(o.prompt_logprobs, [(c.token_ids, c.logprobs) for c in o.outputs]) for o in found]

    assert outputs(speculative_config=config(method, heads[method][0])) == outputs()


class Recorder(ReadsStates):
    """Keeps every state that it is told of, by request and position."""

    streams = (0, 3, 4)
    seen: ClassVar[dict[tuple[str, int], Any]] = {}
    tokens: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, settings: Any) -> None: ...

    def propose(self, tasks: Any) -> Any:
        self.tokens.update({task.request_id: task.token_ids.tolist() for task in tasks})
        return [[1] * min(task.most, 2) for task in tasks]  # mostly wrong

    def observe(self, states: StepStates) -> None:
        rows = zip(states.request_ids, states.starts.tolist(), states.counts.tolist(),
                   states.positions.tolist(), strict=True)  # fmt: skip
        for request_id, start, count, first in rows:
            for n in range(count):
                parts = [x[start + n].clone() for x in (states.hidden, *states.streams)]
                self.seen[request_id, first + n] = parts


@pytest.mark.parametrize("mode", ["batched", "chunked", "eager"])
def test_a_plug_in_reads_the_models_states(mode, llama):
    folder, model, alone = llama
    plugins.register("headrace.draft_proposers", "recorder", Recorder)
    Recorder.seen.clear()
    Recorder.tokens.clear()
    settings = {"method": "recorder", "num_speculative_tokens": 3, "adaptive": False}
    modes = {**MODES[mode], "enable_prefix_caching": False}
    assert run(folder, speculative_config=settings, **modes) == alone
    assert len(Recorder.tokens) == len(PROMPTS)
    for request_id, ids in Recorder.tokens.items():
        last, below = states_of(model, ids[:-1])
        for p in range(len(ids) - 1):
            hidden, *streams = Recorder.seen[request_id, p]
            torch.testing.assert_close(hidden, last[p], atol=1e-4, rtol=1e-4)
            for stream, number in zip(streams, Recorder.streams, strict=True):
                torch.testing.assert_close(stream, below[number][p], atol=1e-4, rtol=1e-4)


def test_a_stream_that_there_is_not_is_refused(llama, monkeypatch):
    monkeypatch.setattr(Recorder, "streams", (5,))
    plugins.register("headrace.draft_proposers", "recorder", Recorder)
    with pytest.raises(UnsupportedFeature, match=r"streams \[5\]: LlamaForCausalLM shows 0 to 4"):
        run(llama[0], speculative_config={"method": "recorder", "num_speculative_tokens": 3})


@pytest.mark.parametrize("tool", ["train_eagle_head.py", "train_draft_model.py"])
def test_the_tools_train_what_serves(tool, tmp_path):
    """A few steps of a tool, more from there, and its own measuring of what they are good for."""
    words = ["--out", str(tmp_path), "--questions", "6", "--steps", "4"]
    assert "4 steps" in ran_tool(tool, "train", *words)
    told = ran_tool(tool, *words, "--resume", "--measured", "2", "--rounds", "1")
    assert told.count("the same answers: True") == 6
    assert "right by position" in told


def test_the_wide_demo_model_says_the_same(tmp_path):
    for tool, name in (("train_eagle_head.py", "head"), ("train_draft_model.py", "draft")):
        ran_tool(tool, "train", "--out", str(tmp_path / name), "--questions", "2", "--steps", "1")
    ran_tool(
        "widen_demo_model.py", "write", "--factor", "4", "--layers", "6", "--out", str(tmp_path),
        "--head", str(tmp_path / "head"), "--draft", str(tmp_path / "draft"),
    )  # fmt: skip
    head = {"method": "eagle", "model": str(tmp_path / "eagle-head"), "num_speculative_tokens": 2}
    draft = {**head, "method": "draft_model", "model": str(tmp_path / "draft-model")}
    params = SamplingParams(temperature=0, max_tokens=24)
    asked = [
        "<|im_start|>user\nWhat is headrace?<|im_end|>\n<|im_start|>assistant\n",
        "one two three",
    ]
    said = []
    wide = {"model": str(tmp_path / "model")}
    for settings in (
        {},
        {**wide, "speculative_config": head},
        {**wide, "speculative_config": draft},
    ):
        with LLM(dtype="float32", max_model_len=256, **settings) as llm:
            said.append(
                [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)]
            )
    assert said[0] == said[1] == said[2]


def ran_tool(tool: str, *words: str) -> str:
    """What a tool wrote."""
    path = Path(__file__).parents[1] / "tools" / tool
    ran = subprocess.run(
        [sys.executable, str(path), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
