"""A disaggregated encoder: an engine makes vectors of media, others take them and run no tower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generic_checkpoints import save_vipllava
from image_checkpoints import picture, save_gemma3, save_llama4, save_qwen2_vl, save_qwen3_vl
from speech_checkpoints import save_voxtral, sound

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, PluginError, UnsupportedFeature

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
PORT = 14711


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seer")
    save_qwen3_vl(folder)
    return folder


def prompts(*numbers: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"the {MARK} water", "multi_modal_data": {"image": picture(number)}}
        for number in numbers
    ]


def tokens(model: LLM, asked: Any) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in model.generate(asked, PARAMS)]


def counts(model: LLM) -> dict[str, int]:
    [report] = model.collective_rpc("report")
    return {name: n for name, n in report.items() if name.startswith("media_")}


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[list[int]]:
    with LLM(str(checkpoint), **SETTINGS) as model:
        return tokens(model, prompts(1, 2, 3))


def transfer(connector: str, role: str, folder: Path, **changes: Any) -> dict[str, Any]:
    extra = {} if connector == "sockets" else {"shared_storage_path": str(folder)}
    settings = {"ec_connector": connector, "ec_role": role, "ec_connector_extra_config": extra}
    port = {"ec_port": PORT} if connector == "sockets" else {}
    return {"ec_transfer_config": {**settings, **port, **changes}}


@pytest.mark.parametrize(
    ("connector", "changes"),
    [
        ("files", {}),
        ("files", {"max_num_batched_tokens": 8, "encoder_cache_size": 0}),
        ("sockets", {"max_num_batched_tokens": 8}),
    ],
)
def test_a_consumer_runs_no_tower(
    checkpoint: Path,
    wanted: list[list[int]],
    tmp_path: Path,
    connector: str,
    changes: dict[str, Any],
) -> None:
    settings = {**SETTINGS, **changes}
    with (
        LLM(str(checkpoint), **settings, **transfer(connector, "ec_producer", tmp_path)) as encoder,
        LLM(str(checkpoint), **settings, **transfer(connector, "ec_consumer", tmp_path)) as model,
    ):
        for _ in range(2):  # the second time nothing is encoded
            outputs = encoder.generate(prompts(1, 2, 1), SamplingParams(max_tokens=5))
            assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 1, 1]
            assert not any(o.outputs[0].text for o in outputs)
        assert counts(encoder)["media_embedded"] == 2
        assert encoder.apply_model(lambda made: len(made.attention_layers())) == [1]
        assert tokens(model, prompts(1, 2)) == wanted[:2]
        assert counts(model) == {"media_embedded": 0, "media_loaded": 2, "media_saved": 0}
        # What nobody encoded, its own tower does.
        assert tokens(model, prompts(3)) == wanted[2:]
        assert counts(model) == {"media_embedded": 1, "media_loaded": 2, "media_saved": 0}


OTHERS: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    "gemma3": (save_gemma3, "<start_of_image>", {"image": picture(1)}),
    "llama4": (save_llama4, "<|image|>", {"image": picture(1)}),
    "voxtral": (save_voxtral, "[AUDIO]", {"audio": (sound(1), 16000)}),
    "by transformers": (save_vipllava, "<image>", {"image": picture(1)}),
}
"""Kind -> what saves a checkpoint, its placeholder, an item."""


@pytest.mark.parametrize("kind", OTHERS)
def test_other_classes(kind: str, tmp_path: Path) -> None:
    save, mark, data = OTHERS[kind]
    checkpoint, shared = tmp_path / "model", tmp_path / "shared"
    checkpoint.mkdir()
    save(checkpoint)
    prompt = {"prompt": f"the {mark} water", "multi_modal_data": data}
    with LLM(str(checkpoint), **SETTINGS, **transfer("files", "ec_producer", shared)) as encoder:
        encoder.generate(prompt, PARAMS)
    with LLM(str(checkpoint), **SETTINGS) as model:
        alone = tokens(model, prompt)
    with LLM(str(checkpoint), **SETTINGS, **transfer("files", "ec_consumer", shared)) as model:
        assert tokens(model, prompt) == alone
        assert counts(model)["media_embedded"] == 0


def test_a_connector_in_a_module(
    checkpoint: Path, wanted: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_vectors.py").write_text(
        "from headrace_core.multimodal import ECConnector\n"
        "KEPT = {}\n"
        "class InMemory(ECConnector):\n"
        "    def save(self, key, vectors): KEPT[key] = vectors\n"
        "    def load(self, key): return KEPT.get(key)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    named = {"ec_connector": "InMemory", "ec_connector_module_path": "shared_vectors"}
    with LLM(
        str(checkpoint),
        **SETTINGS,
        ec_transfer_config={**named, "ec_role": "ec_producer", "ec_rank": 0},
    ) as encoder:
        encoder.generate(prompts(1), PARAMS)
    with LLM(
        str(checkpoint),
        **SETTINGS,
        ec_transfer_config={**named, "ec_role": "ec_consumer", "ec_rank": 1},
    ) as model:
        assert tokens(model, prompts(1)) == wanted[:1]
        assert counts(model)["media_embedded"] == 0


def test_what_a_producer_refuses(checkpoint: Path, tmp_path: Path) -> None:
    with LLM(str(checkpoint), **SETTINGS, **transfer("files", "ec_producer", tmp_path)) as encoder:
        with pytest.raises(UnsupportedFeature, match="must bring media"):
            encoder.generate("the water", PARAMS)
        for name, value in {"n": 2, "logprobs": 1, "prompt_logprobs": 1}.items():
            with pytest.raises(UnsupportedFeature, match=f"{name} = {value}"):
                encoder.generate(prompts(1), SamplingParams(**{name: value}))
        assert counts(encoder)["media_embedded"] == 0
        with pytest.raises(UnsupportedFeature, match="reload_weights: engines of a disaggregated"):
            encoder.collective_rpc("reload_weights")


def test_other_models_have_other_vectors(
    checkpoint: Path, wanted: list[list[int]], tmp_path: Path
) -> None:
    """And damaged files cost the work of a tower."""
    other = tmp_path / "other"
    other.mkdir()
    save_qwen2_vl(other)
    shared = tmp_path / "shared"
    with LLM(str(other), **SETTINGS, **transfer("files", "ec_producer", shared)) as encoder:
        encoder.generate(prompts(1), PARAMS)
    with LLM(str(checkpoint), **SETTINGS, **transfer("files", "ec_consumer", shared)) as model:
        assert tokens(model, prompts(1)) == wanted[:1]
        assert counts(model)["media_embedded"] == 1
    with LLM(str(checkpoint), **SETTINGS, **transfer("files", "ec_producer", shared)) as encoder:
        encoder.generate(prompts(2), PARAMS)
    for file in shared.glob("*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-4])
    with LLM(str(checkpoint), **SETTINGS, **transfer("files", "ec_consumer", shared)) as model:
        assert tokens(model, prompts(2)) == wanted[1:2]
        assert counts(model)["media_loaded"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ec_role": "both"}, r"ec_role = 'both': must be ec_producer or ec_consumer"),
        ({"ec_role": None}, r"ec_role = None"),
        ({"ec_buffer_device": "cuda"}, r"ec_buffer_device = 'cuda': must be cpu"),
        ({"ec_rank": 1}, r"ec_rank = 1: must be 0 of a producer"),
        ({"ec_colour": 1}, r"ec_colour = 1: must be left out: fields are ec_connector"),
        ({"ec_connector_extra_config": {}}, r"shared_storage_path = None: must be a folder"),
        (
            {"ec_connector_extra_config": {"shared_storage_path": "/proc/x"}},
            r"'/proc/x': must be a folder",
        ),
        ({"ec_connector": "file"}, r"'file'.*Did you mean 'files'"),
        ({"ec_port": 1}, r"ec_port = 1: must be left out: a folder has no address"),
        (
            {"ec_connector_module_path": "no.such"},
            r"module_path = 'no\.such': must be a Python module",
        ),
        (
            {"ec_connector_module_path": "json", "ec_connector": "JSONDecoder"},
            r"subclass of ECConnector",
        ),
        ({"ec_connector": "sockets"}, r"shared_storage_path = .*must be left out"),
        (
            {"ec_connector": "sockets", "ec_connector_extra_config": {}, "ec_ip": "0.0.0.0"},
            r"ec_ip = '0\.0\.0\.0'",
        ),
    ],
)
def test_what_is_wrong_is_said_at_start(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        LLM(str(checkpoint), **SETTINGS, **transfer("files", "ec_producer", tmp_path, **changes))


def test_models_without_towers_refuse(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"ec_role = 'ec_consumer': must be left out for .*takes no media"
    ):
        LLM(**SETTINGS, **transfer("files", "ec_consumer", tmp_path))
