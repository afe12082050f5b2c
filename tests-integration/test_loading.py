"""Formats of checkpoints through a whole engine: the demo model, in each, says the same."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_command
from safetensors.torch import load_file, save_file

from headrace import LLM, EngineArgs, SamplingParams, demo
from headrace.sharded_state import save_sharded_state
from headrace_core.errors import ConfigError, PromptTooLong, RequestError, WeightsError

ROOT = Path(__file__).parent.parent
SMALL = {"max_model_len": 512, "max_num_seqs": 4, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
CHAT = [{"role": "user", "content": "What is 3 + 4?"}]


def answer(**settings: Any) -> tuple[list[int], str]:
    with LLM(**{**SMALL, **settings}) as llm:
        return _answer(llm)


def _answer(llm: LLM) -> tuple[list[int], str]:
    output = llm.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0]
    return list(output.token_ids), output.text


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], str]:
    return answer(dtype="float32")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in floats as llama.cpp's converter would write it."""
    pytest.importorskip("gguf")
    from gguf_blocks import write_demo

    return write_demo(tmp_path_factory.mktemp("gguf") / "demo.gguf")


class TestGGUF:
    def test_alone(self, gguf_file: Path, expected: Any) -> None:
        assert answer(model=str(gguf_file), dtype="float32") == expected

    def test_with_the_original_tokenizer(self, gguf_file: Path, expected: Any) -> None:
        found = answer(model=str(gguf_file), tokenizer=str(demo.path()), dtype="float32")
        assert found == expected

    def test_inspect(self, gguf_file: Path) -> None:
        done = run_command("inspect", str(gguf_file), "--json")
        found = json.loads(done.stdout)
        assert found["architecture"] == "LlamaForCausalLM"
        assert found["memory"]["fits"]

    @pytest.mark.req("REL-13")
    def test_cut_short_is_refused_before_a_port_opens(
        self, gguf_file: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "cut.gguf"
        file.write_bytes(gguf_file.read_bytes()[:-1000])
        done = run_command("serve", str(file), "--port", "0")
        assert done.returncode != 0
        assert "cut.gguf: not a valid GGUF file: tensor " in done.stderr
        assert "truncated" in done.stderr
        assert "Traceback" not in done.stderr


def test_pytorchs_own_file(tmp_path: Path, expected: Any) -> None:
    folder = shutil.copytree(demo.path(), tmp_path / "m")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert answer(model=str(folder), dtype="float32") == expected


class TestShardedState:
    def test_saved_and_loaded(self, tmp_path: Path, expected: Any) -> None:
        config = EngineArgs(model=str(demo.path()), dtype="float32", **SMALL).create_engine_config()
        files = save_sharded_state(config, tmp_path, max_file_size=500_000)
        assert len(files) > 1
        found = answer(model=str(tmp_path), dtype="float32", load_format="sharded_state")
        assert found == expected
        assert not (tmp_path / "model.safetensors").exists()

    def test_a_gguf_file_is_no_folder(self, gguf_file: Path, tmp_path: Path) -> None:
        config = EngineArgs(model=str(gguf_file), **SMALL).create_engine_config()
        with pytest.raises(ConfigError, match="must be a local folder"):
            save_sharded_state(config, tmp_path)

    def test_the_examples(self, tmp_path: Path) -> None:
        def run(script: str, *words: str) -> str:
            return subprocess.run(
                [sys.executable, str(ROOT / "examples" / script), *words],
                capture_output=True, text=True, timeout=180, check=True,
            ).stdout  # fmt: skip

        out = str(tmp_path / "out")
        small = ("--max-model-len", "256", "--num-threads", "1")
        saved = run("save_sharded_state.py", "--model", str(demo.path()), "--output", out, *small)
        assert saved.strip().endswith("model-rank-0-part-0.safetensors")
        said = run("load_sharded_state.py", "--model", out, "--max-tokens", "4", *small)
        assert said.startswith("Format: sharded_state\nTensor-parallel size: 1\nText: ")


@pytest.mark.parametrize("process", [False, True])
def test_weights_that_come_later(process: bool, expected: Any) -> None:
    settings = {**SMALL, "model": str(demo.path()), "dtype": "float32"}
    with LLM(**settings, load_format="dummy", engine_process=process) as llm:
        assert _answer(llm) != expected
        with pytest.raises(RequestError, match=r"must be \{'load_config'.*load_format or"):
            llm.collective_rpc("update_config", args=({"load_config": {"download_dir": "/"}},))
        with pytest.raises(RequestError, match="args: update_config takes 1"):
            llm.collective_rpc("update_config")
        llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
        llm.collective_rpc("reload_weights")
        assert _answer(llm) == expected
        assert _answer(llm) == expected  # from the prefix cache, which is the new model's


@pytest.mark.req("REL-13")
def test_a_tensor_that_is_missing_is_named_before_a_port_opens(tmp_path: Path) -> None:
    folder = shutil.copytree(demo.path(), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"missing from the checkpoint: '{name}'"):
        LLM(model=str(folder), **SMALL)


def test_a_context_that_yarn_extends(tmp_path: Path) -> None:
    folder = shutil.copytree(demo.path(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    prompt = {"prompt_token_ids": [5 + number % 900 for number in range(200)]}
    settings = {"model": str(folder), "num_threads": 1, "max_num_seqs": 4}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with LLM(**settings) as llm, pytest.raises(PromptTooLong):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    with LLM(**settings, hf_overrides={"rope_parameters": yarn}) as llm:
        assert llm.model_info.max_model_len == 256
        assert llm.model_info.config["rope_parameters"] == {**config["rope_parameters"], **yarn}
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) > 0


def test_a_length_above_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"num_threads": 1, "max_num_seqs": 4, "max_model_len": 4096, "dtype": "float32"}
    prompt = {"prompt_token_ids": [5 + number % 900 for number in range(640)]}
    with pytest.raises(ConfigError, match="HEADRACE_ALLOW_LONG_MAX_MODEL_LEN=1 allows more"):
        LLM(**settings)
    monkeypatch.setenv("HEADRACE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    found = []
    for step in (64, 2048):  # ten chunks, and one
        with LLM(**settings, max_num_batched_tokens=step) as llm:
            found.append(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def without_tokenizer(folder: Path) -> None:
    """The demo model but for its tokenizer."""
    for file in demo.path().iterdir():
        if file.suffix in (".json", ".safetensors") and not file.name.startswith("tokenizer"):
            shutil.copy(file, folder)


def test_a_tokenizer_of_kimis(tmp_path: Path) -> None:
    """``tiktoken.model`` serves where there is no ``tokenizer.json``; of the code beside it nothing runs."""
    without_tokenizer(tmp_path)
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    config = {"added_tokens_decoder": {"260": {"content": "<x>", "special": True}},
              "auto_map": {"AutoTokenizer": ["tokenization_kimi.Own", None]}}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    code = 'raise SystemExit("it runs")\npat_str = "|".join([r"\\s+", r"\\S+"])\n'
    (tmp_path / "tokenization_kimi.py").write_text(code)
    with LLM(model=str(tmp_path), **SMALL) as llm:
        output = llm.generate(["Hi!<x> é"], GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids == [*b"Hi!", 260, *" é".encode()]


def test_a_tokenizer_of_mistrals(tmp_path: Path) -> None:
    """``tekken.json`` serves where there is no ``tokenizer.json``; here each byte is a token."""
    without_tokenizer(tmp_path)
    vocab = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()}
        for byte in range(256)
    ]
    config = {"pattern": r"\s+|\S+", "version": "v3", "default_vocab_size": 276,
              "default_num_special_tokens": 20}  # fmt: skip
    (tmp_path / "tekken.json").write_text(json.dumps({"vocab": vocab, "config": config}))
    with LLM(model=str(tmp_path), **SMALL) as llm:
        output = llm.generate(["Hi!"], GREEDY, use_tqdm=False)[0]
        assert output.prompt_token_ids == [1, *(20 + byte for byte in b"Hi!")]
        ids = output.outputs[0].token_ids
        assert output.outputs[0].text == bytes(i - 20 for i in ids if 20 <= i < 276).decode(
            errors="replace"
        )
