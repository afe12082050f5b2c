from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, NetworkError, UnsupportedModel, WeightsError
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform, Platform
from headrace_models.checkpoint.source import fetch
from headrace_models.config.settings import Settings
from headrace_models.resolve import resolve, text_part
from headrace_models.transformers_backend.checkpoint_code import refuse_foreign_code


class HalfPlatform(CpuPlatform):
    """A device that does not multiply float32."""

    def dtype_for(self, checkpoint_dtype: str) -> str:
        return "float16" if checkpoint_dtype == "float32" else checkpoint_dtype


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99,
    "hidden_size": 8, "max_position_embeddings": 64, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3).half()}, tmp_path / "model.safetensors")
    return tmp_path


def run(
    folder: Path,
    *,
    generation: dict[str, Any] | None = None,
    platform: Platform | None = None,
    drop: tuple[str, ...] = (),
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> ModelInfo:
    whole = {**CONFIG, **(config or {})}
    for key in drop:
        del whole[key]
    (folder / "config.json").write_text(json.dumps(whole))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return resolve(
        ModelConfig(model=str(folder), **settings), LoadConfig(), platform or CpuPlatform()
    )


CONSOLIDATED = [
    "consolidated-00001-of-00002.safetensors",
    "consolidated-00002-of-00002.safetensors",
]


def repository(folder: Path, monkeypatch: pytest.MonkeyPatch, there: list[str]) -> None:
    """A hub whose only repository, ``owner/name``, has these files, downloaded to ``folder``."""

    def download(
        name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any
    ) -> str:
        assert name == "owner/name"
        for each in there:
            ignored = any(fnmatch(each, pattern) for pattern in ignore_patterns)
            if not ignored and any(fnmatch(each, pattern) for pattern in allow_patterns):
                (folder / each).parent.mkdir(exist_ok=True)
                (folder / each).touch()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


class TestArchitecture:
    def test_first_registered_entry_is_taken(self, folder: Path) -> None:
        names = ["NobodyForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]
        info = run(folder, config={"architectures": names})
        assert info.architecture == "Qwen3ForCausalLM"
        assert info.source == "native"
        assert info.weight_bytes == 4 * 16 + 2 * 3
        assert info.vocab_size == 99

    def test_typo_prints_the_nearest(self, folder: Path) -> None:
        with pytest.raises(UnsupportedModel) as caught:
            run(folder, config={"architectures": ["LamaForCausalLM"]})
        message = str(caught.value)
        assert "['LamaForCausalLM']" in message
        assert "not supported" in message
        assert "hf_overrides" in message
        assert "LlamaForCausalLM" in message.split("Nearest")[1]
        assert len(message.split("Nearest supported: ")[1].split(". ")[0].split(", ")) <= 5

    @pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3], {}])
    def test_unusable_lists(self, folder: Path, value: object) -> None:
        with pytest.raises(UnsupportedModel, match="not supported"):
            run(folder, config={"architectures": value})

    def test_override_decides(self, folder: Path) -> None:
        overrides = {"architectures": ["GPT2LMHeadModel"], "classifier_from_token": ["a"]}
        info = run(folder, drop=("architectures",), hf_overrides=overrides)
        assert info.architecture == "GPT2LMHeadModel"
        assert info.config["classifier_from_token"] == ["a"]

    def test_override_by_a_function(self, folder: Path) -> None:
        def smaller(config: dict[str, Any]) -> dict[str, Any]:
            return {**config, "architectures": ["GPT2LMHeadModel"], "n_positions": 32}

        info = run(folder, drop=("max_position_embeddings",), hf_overrides=smaller)
        assert (info.architecture, info.max_model_len) == ("GPT2LMHeadModel", 32)

    def test_text_part_of_a_composed_config(self) -> None:
        whole = {"vocab_size": 1, "dtype": "float32", "vision_config": {"vocab_size": 9},
                 "text_config": {"vocab_size": 2}, "quantization_config": {"quant_method": "x"}}  # fmt: skip
        assert text_part(whole) == {
            "vocab_size": 2, "dtype": "float32", "quantization_config": {"quant_method": "x"},
        }  # fmt: skip

    def test_no_torch_is_imported(self, folder: Path) -> None:
        run(folder)
        code = (
            "import sys; from headrace_core.config import *; from headrace_core.platform import *; "
            "from headrace_models.resolve import resolve; "
            "from headrace_models.quantization import quant_method; "
            f"resolve(ModelConfig(model={str(folder)!r}), LoadConfig(), CpuPlatform()); "
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class TestFacts:
    @pytest.mark.parametrize(
        ("config", "platform", "wanted", "dtype"),
        [
            ({}, CpuPlatform(), "auto", "bfloat16"),
            ({"torch_dtype": None, "dtype": "float16"}, CpuPlatform(), "auto", "float16"),
            ({"torch_dtype": "torch.float32"}, CpuPlatform(), "auto", "float32"),
            ({"torch_dtype": "float32"}, HalfPlatform(), "auto", "float16"),
            ({}, CpuPlatform(), "half", "float16"),
            ({"torch_dtype": None}, CpuPlatform(), "auto", "float32"),  # from the weights
        ],
    )
    def test_dtype(
        self, folder: Path, config: dict[str, Any], platform: Platform, wanted: str, dtype: str
    ) -> None:
        assert run(folder, config=config, platform=platform, dtype=wanted).dtype == dtype

    def test_unknown_dtype(self, folder: Path) -> None:
        with pytest.raises(UnsupportedModel, match="dtype = 'float64'"):
            run(folder, config={"torch_dtype": "float64"})

    @pytest.mark.parametrize(("wanted", "length"), [(None, 64), (-1, 64), (40, 40), (64, 64)])
    def test_length(self, folder: Path, wanted: int | None, length: int) -> None:
        assert run(folder, max_model_len=wanted).max_model_len == length

    def test_length_of_gpt2(self, folder: Path) -> None:
        drop = ("max_position_embeddings",)
        assert run(folder, config={"n_positions": 33}, drop=drop).max_model_len == 33

    def test_length_of_command_r(self, folder: Path) -> None:
        """Its positions are those of its first training; it is served with more."""
        config = {"model_type": "cohere", "model_max_length": 128}
        assert run(folder, config=config).max_model_len == 128
        assert run(folder, config={**config, "model_type": "llama"}).max_model_len == 64

    def test_too_long(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            ConfigError, match=r"65: must be at most 64.*HEADRACE_ALLOW_LONG"
        ) as caught:
            run(folder, max_model_len=65)
        assert caught.value.field == "model.max_model_len"
        monkeypatch.setenv("HEADRACE_ALLOW_LONG_MAX_MODEL_LEN", "1")
        assert run(folder, max_model_len=65).max_model_len == 65

    @pytest.mark.parametrize(
        ("generation", "config", "ids"),
        [
            (None, {}, (2,)),
            ({}, {}, (2,)),
            ({"eos_token_id": [7, 8, 7]}, {}, (7, 8)),
            ({"eos_token_id": 5}, {"eos_token_id": [1]}, (5,)),
            ({"eos_token_id": None}, {"eos_token_id": [1, 3]}, (1, 3)),
            (None, {"eos_token_id": None}, ()),
            (None, {"eos_token_id": 0}, (0,)),
        ],
    )
    def test_end_tokens(
        self,
        folder: Path,
        generation: dict[str, Any] | None,
        config: dict[str, Any],
        ids: tuple[int, ...],
    ) -> None:
        assert run(folder, generation=generation, config=config).eos_token_ids == ids

    @pytest.mark.parametrize("value", ["</s>", -1, True, [1.5]])
    def test_impossible_end_tokens(self, folder: Path, value: object) -> None:
        with pytest.raises(UnsupportedModel, match="eos_token_id"):
            run(folder, config={"eos_token_id": value})

    def test_generation_config(self, folder: Path, tmp_path: Path) -> None:
        stored = {"temperature": 0.5, "eos_token_id": 9}
        assert run(folder, generation=stored).generation_config == stored
        neutral = run(folder, generation_config="headrace", override_generation_config={"top_k": 3})
        assert neutral.generation_config == {"top_k": 3}
        assert neutral.eos_token_ids == (9,)
        other = tmp_path / "other"
        other.mkdir()
        (other / "generation_config.json").write_text('{"top_p": 0.5}')
        assert run(folder, generation_config=str(other)).generation_config == {"top_p": 0.5}
        with pytest.raises(ConfigError, match="'nowhere'"):
            run(folder, generation_config="nowhere")

    @pytest.mark.parametrize("value", [0, -5, 1.5, True, "99", None])
    def test_hostile_vocabulary(self, folder: Path, value: object) -> None:
        with pytest.raises(UnsupportedModel, match="vocab_size"):
            run(folder, config={"vocab_size": value})


class TestSource:
    def test_nothing_named(self) -> None:
        with pytest.raises(ConfigError, match=r"model\.model"):
            resolve(ModelConfig(), LoadConfig(), CpuPlatform())

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "../nothing", "a/b/c"])
    def test_missing_folder(self, name: str) -> None:
        with pytest.raises(ConfigError, match="no such folder"):
            resolve(ModelConfig(model=name), LoadConfig(), CpuPlatform())

    def test_hub_name_offline_fails_naming_id_and_cache(self, tmp_path: Path) -> None:
        code = (
            "from headrace_models.checkpoint.source import fetch\n"
            f"fetch('some-owner/some-model', download_dir={str(tmp_path)!r})"
        )
        env = {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin", "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            timeout=60,
            check=False,
            env=env,
            capture_output=True,
            text=True,
        )
        last = done.stderr.strip().splitlines()[-1]
        assert "NetworkError" in last
        assert "'some-owner/some-model'" in last
        assert str(tmp_path) in last

    def test_offline_asks_the_cache_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hub of the test's is never asked, and what its cache holds is found."""
        monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
        with pytest.raises(
            NetworkError, match=r"'owner/name': offline = True.*hf download owner/name"
        ):
            fetch("owner/name", download_dir=str(tmp_path), offline=True)
        cached = tmp_path / "models--owner--name"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("c0ffee")
        (cached / "snapshots" / "c0ffee").mkdir(parents=True)
        (cached / "snapshots" / "c0ffee" / "model.safetensors").touch()
        found = fetch("owner/name", download_dir=str(tmp_path), offline=True)
        assert found == cached / "snapshots" / "c0ffee"

    def test_offline_another_repository_s_code_is_refused(self) -> None:
        refuse_foreign_code({"auto_map": {"AutoModel": "modeling_x.XModel"}})
        refuse_foreign_code({})
        with pytest.raises(NetworkError, match=r"auto_map\.AutoModel = 'o/n--modeling_x\.XModel'"):
            refuse_foreign_code({"auto_map": {"AutoModel": "o/n--modeling_x.XModel"}})

    @pytest.mark.parametrize(
        ("file", "others"),
        [
            ("m.gguf", []),
            ("q4/m.gguf", []),
            ("q4/m-00001-of-00003.gguf", ["q4/m-00002-of-00003.gguf", "q4/m-00003-of-00003.gguf"]),
        ],
    )
    def test_gguf_file_of_a_hub_repository(
        self, file: str, others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repository(tmp_path, monkeypatch, [file, *others, "q8/m.gguf", "config.json"])
        assert fetch(f"owner/name/{file}") == tmp_path / file
        found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.gguf")}
        assert found == {file, *others}

    @pytest.mark.parametrize(
        ("there", "load_format", "weights"),
        [
            (["params.json", *CONSOLIDATED], "auto", CONSOLIDATED),
            (["params.json", *CONSOLIDATED], "safetensors", []),
            (["params.json", *CONSOLIDATED], "mistral", CONSOLIDATED),
            (["params.json", *CONSOLIDATED, "config.json"], "auto", []),
            (["params.json", *CONSOLIDATED, "config.json", "model.safetensors"], "auto",
             ["model.safetensors"]),
            ([*CONSOLIDATED, "config.json", "pytorch_model.bin"], "auto", ["pytorch_model.bin"]),
        ],
    )  # fmt: skip
    def test_mistrals_layout_comes_where_there_is_no_other(
        self,
        there: list[str],
        load_format: str,
        weights: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        repository(tmp_path, monkeypatch, there)
        assert fetch("owner/name", load_format=load_format) == tmp_path
        assert sorted(f.name for f in tmp_path.iterdir() if f.suffix != ".json") == weights

    def test_gguf_of_the_hub_needs_a_file(self) -> None:
        with pytest.raises(ConfigError, match=r"owner/name/FILE\.gguf"):
            fetch("owner/name", load_format="gguf")

    def test_folder_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"config\.json: not found"):
            resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())

    @pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
    def test_damaged_config(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(UnsupportedModel, match=r"config\.json"):
            resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())

    def test_damaged_weights_are_found_before_loading(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.raises(WeightsError, match=r"model\.safetensors.*truncated"):
            run(folder)


class TestSettings:
    def test_head_dim(self) -> None:
        assert Settings({"hidden_size": 64, "num_attention_heads": 4}).head_dim() == 16
        assert Settings({"head_dim": 9}).head_dim() == 9
        assert (
            Settings({"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}).head_dim(8)
            == 8
        )
        with pytest.raises(UnsupportedModel, match="hidden_size = 65"):
            Settings({"hidden_size": 65, "num_attention_heads": 4}).head_dim()

    def test_kv_heads_must_divide(self) -> None:
        with pytest.raises(UnsupportedModel, match="num_key_value_heads = 3"):
            Settings({"num_attention_heads": 4, "num_key_value_heads": 3}).num_kv_heads()

    def test_layer_types(self) -> None:
        good = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
        assert Settings(good).layer_types() == good["layer_types"]
        for bad in (["full_attention"], ["full_attention", "linear_attention"], "full_attention"):
            with pytest.raises(UnsupportedModel, match="layer_types"):
                Settings({**good, "layer_types": bad}).layer_types()

    def test_activation(self) -> None:
        assert Settings({"hidden_act": "gelu_pytorch_tanh"}).activation("hidden_act") == "gelu_tanh"
        assert Settings({"b": "silu"}).activation("a", "b") == "silu"
        with pytest.raises(UnsupportedModel, match="hidden_act = 'xielu'"):
            Settings({"hidden_act": "xielu"}).activation("hidden_act")

    @pytest.mark.parametrize("value", [0, -1, "30", float("nan"), float("inf"), 10**400, True])
    def test_numbers_above_0(self, value: object) -> None:
        with pytest.raises(UnsupportedModel, match=r"config\.json: x = .*: must be a number"):
            Settings({"x": value}).positive("x")

    def test_optional_numbers(self) -> None:
        assert [Settings({"x": v}).optional_positive("x") for v in (None, 0, 2)] == [
            None,
            None,
            2.0,
        ]
        assert Settings({}).optional_positive("x") is None
