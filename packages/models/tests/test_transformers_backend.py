"""Models by transformers' code over headrace's cache and kernels."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pooling_decoders
import pytest
import test_encoders as encoders
import test_families as families
import test_rotary_encoders as rotary_encoders
import torch
from checkpoint_code import Written
from model_families_conformance import FamilyConformance
from pooling_families_conformance import PoolingFamilyConformance
from safetensors.torch import load_file, save_file

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, HeadraceError, UnsupportedModel, WeightsError
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.convert import model_class
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_models.transformers_backend import library
from headrace_testing.model.decoders import PagedDriver, build_context, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of model code that is not ours


class ByTransformers(FamilyConformance):
    """A suite of a family, with the other implementation."""

    no_stages = "not one of headrace's decoders"
    takes_adapters = False

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return super().resolve(path, **{"model_impl": "transformers", **settings})


class TestLlamaByTransformers(ByTransformers, families.TestLlama):
    tensor_parallel = 2


class TestQwen3ByTransformers(ByTransformers, families.TestQwen3):
    """Windows on one layer: two groups of the cache."""


class TestMixtralByTransformers(ByTransformers, families.TestMixtral):
    """Experts are stored one by one and become one tensor."""

    def test_an_expert_that_comes_twice(self, tmp_path: Path) -> None:
        path = self.make_checkpoint(tmp_path).path
        tensors = load_file(path / "model.safetensors")
        name = next(name for name in tensors if ".experts." in name)
        (path / "model.safetensors").rename(path / "one.safetensors")
        save_file({name: tensors[name]}, path / "two.safetensors")
        with pytest.raises(WeightsError, match=rf"two\.safetensors: tensor '{name}' comes twice"):
            self.open(path)


class TestPhi3LongByTransformers(ByTransformers, families.TestPhi3Long):
    """Fused projections; frequencies that transformers would choose for each batch."""


class TestGPT2ByTransformers(ByTransformers, families.TestGPT2):
    """Learned positions, transposed weights."""

    tensor_parallel = 1  # transformers has no plan for it


class PoolsByTransformers(PoolingFamilyConformance):
    """A suite of a pooling model, with the other implementation."""

    takes_adapters = False

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return super().resolve(path, **{"model_impl": "transformers", **settings})


class TestBertByTransformers(PoolsByTransformers, encoders.TestBert):
    tensor_parallel = 1  # transformers has no plan for it


class TestBertForSequenceClassificationByTransformers(
    PoolsByTransformers, encoders.TestBertForSequenceClassification
):
    tensor_parallel = 1


class TestBertForTokenClassificationByTransformers(
    PoolsByTransformers, encoders.TestBertForTokenClassification
):
    tensor_parallel = 1


class TestRobertaByTransformers(PoolsByTransformers, encoders.TestRoberta):
    """Positions begin behind the padding."""

    tensor_parallel = 1


class TestModernBertByTransformers(PoolsByTransformers, rotary_encoders.TestModernBert):
    """Windows to both sides."""

    tensor_parallel = 1


class TestQwen3ModelByTransformers(PoolsByTransformers, pooling_decoders.PoolingDecoderConformance):
    reference = "Qwen3Model"


class TestQwen3ForSequenceClassificationByTransformers(
    PoolsByTransformers, pooling_decoders.PoolingDecoderConformance
):
    makes = "labels"
    reference = "Qwen3ForSequenceClassification"


FOREIGN = "DogeForCausalLM"
"""An architecture that headrace has no class for."""


def found(folder: Path, **settings: Any) -> ModelInfo:
    whole = {"max_model_len": 32, **settings}
    return resolve(ModelConfig(model=str(folder), **whole), LoadConfig(), CpuPlatform())


class TestWhoseCode:
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("model")
        families.TestLlama().make_checkpoint(folder)
        return folder

    @pytest.mark.parametrize(
        ("wanted", "source", "name"),
        [
            ("auto", "native", "LlamaForCausalLM"),
            ("headrace", "native", "LlamaForCausalLM"),
            ("vllm", "native", "LlamaForCausalLM"),
            ("transformers", "transformers", "TransformersForCausalLM"),
        ],
    )
    def test_choice(self, folder: Path, wanted: str, source: str, name: str) -> None:
        info = found(folder, model_impl=wanted)
        assert (info.source, model_class(info).__name__) == (source, name)

    def test_unknown_choice(self) -> None:
        with pytest.raises(ConfigError, match="'auto', 'headrace', 'transformers'"):
            ModelConfig(model_impl="torch")  # type: ignore[arg-type]

    def test_pooling(self, folder: Path) -> None:
        info = found(folder, model_impl="transformers", runner="pooling")
        assert model_class(info).__name__ == "TransformersForPooling"

    def test_facts_are_the_configs(self, folder: Path) -> None:
        native, other = found(folder), found(folder, model_impl="transformers")
        for name in (
            "vocab_size",
            "max_model_len",
            "dtype",
            "eos_token_ids",
            "tasks",
            "architecture",
        ):
            assert getattr(native, name) == getattr(other, name), name

    def test_fallback_warns_unless_it_is_meant(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        asked: tuple[tuple[str, dict[str, Any]], ...] = (
            ("WARNING", {"hf_overrides": {"architectures": [FOREIGN]}}),
            ("INFO", {"model_impl": "transformers"}),
        )
        for level, settings in asked:
            caplog.clear()
            with caplog.at_level(logging.INFO, "headrace_models.implementation"):
                info = found(folder, **settings)
            assert info.source == "transformers"
            told = [r.levelname for r in caplog.records if info.architecture in r.message]
            assert told == [level]

    def test_headrace_alone(self, folder: Path) -> None:
        with pytest.raises(UnsupportedModel, match="allows no other class"):
            found(folder, model_impl="headrace", hf_overrides={"architectures": [FOREIGN]})

    def test_without_the_library(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library.transformers.cache_clear()
        library._class_names.cache_clear()
        monkeypatch.setitem(sys.modules, "transformers", None)
        try:
            with pytest.raises(HeadraceError, match=r"headrace-models\[transformers\]"):
                found(folder, model_impl="transformers")
            with pytest.raises(UnsupportedModel, match=r"headrace-models\[transformers\]"):
                found(folder, hf_overrides={"architectures": [FOREIGN]})
        finally:
            library.transformers.cache_clear()
            library._class_names.cache_clear()

    @pytest.mark.parametrize(
        "overrides",
        [
            {"hidden_size": "wide"},
            {"num_attention_heads": 5},
            {"model_type": 3},
            {"model_type": "no"},
        ],
    )
    def test_configs_that_transformers_refuses(self, folder: Path, overrides: Any) -> None:
        with pytest.raises(UnsupportedModel, match=r"config\.json"):
            found(folder, model_impl="transformers", hf_overrides=overrides)

    def test_no_kernels_of_the_checkpoints_choice(self, folder: Path) -> None:
        overrides = {"attn_implementation": "somebody/kernels", "_attn_implementation": "flash"}
        info = found(folder, model_impl="transformers", hf_overrides=overrides)
        model = load_model(info, build_context(info))
        assert model.tree.config._attn_implementation == "headrace"


_CALL = "x = x + self.attn(self.norm(x), **kwargs)"
_ATTEND = "out, _ = attend(self"
_OUT = "return self.o("
_OWN_PRODUCT = "nn.functional.linear(out.reshape(*x.shape[:-1], -1), self.o.weight)"
REQUIREMENTS = [
    ("Marker", "_supports_attention_backend = True", "pass"),
    (
        "Keyword arguments",
        "mask=None, **kwargs):\n        x =",
        "mask=None, kwargs={}):\n        x =",
    ),
    ("Keyword arguments", "mask=attention_mask, **kwargs)", "mask=attention_mask)"),
    ("Attention", "self.config._attn_implementation, eager", '"sdpa", eager'),
    ("positions", "position_ids)", "torch.arange(input_ids.shape[1])[None])"),
    ("outside of attention", _CALL, f"{_CALL} + x.cumsum(1)"),
    ("passes bias", _ATTEND, f"kwargs['bias'] = self.o.bias\n        {_ATTEND}"),
    ("both directions", "is_causal = True", "is_causal = False"),
    ("weight of a linear layer", _OUT, f"return {_OWN_PRODUCT} + self.o("),
]
"""Words of the error, and what of the code is changed into what."""


class TestCheckpointsOwnCode:
    def logits(self, written: Written) -> None:
        """Equal to the model's own, in chunks and batches."""
        info = found(written.folder, trust_remote_code=True)
        driver = PagedDriver(load_model(info, build_context(info)))
        a, b = [5, 17, 33, 90, 4, 8], [3, 11]
        got = [driver.step({"a": a[:4]}), driver.step({"b": b, "a": a[4:]})]
        wanted = (written.logprobs(a)[:4], written.logprobs(b), written.logprobs(a)[4:])
        torch.testing.assert_close(
            torch.cat(got).log_softmax(-1), torch.cat(wanted), atol=1e-4, rtol=0
        )

    def test_it_is_served(self, tmp_path: Path) -> None:
        self.logits(Written(tmp_path))

    def test_only_if_it_is_trusted(self, tmp_path: Path) -> None:
        Written(tmp_path, {"import torch\n": "raise SystemExit('ran')\n"})
        with pytest.raises(ConfigError, match="--trust-remote-code"):
            found(tmp_path)

    def test_code_that_fails_is_named(self, tmp_path: Path) -> None:
        Written(tmp_path, {"import torch\n": "raise ValueError('broken here')\n"})
        with pytest.raises(UnsupportedModel, match=r"modeling_tiny\.TinyConfig.*broken here"):
            found(tmp_path, trust_remote_code=True)

    def test_two_ranks(self, tmp_path: Path) -> None:
        written = Written(tmp_path)
        info = found(tmp_path, trust_remote_code=True)
        prompt = [5, 17, 33, 90, 4, 8]

        def work(communicator: Any) -> Any:
            part = load_model(info, build_context(info, communicator=communicator))
            return PagedDriver(part).step({"a": prompt})

        for logits in run_ranks(2, work):
            torch.testing.assert_close(
                logits.log_softmax(-1), written.logprobs(prompt), atol=1e-4, rtol=0
            )

    @pytest.mark.parametrize(("words", "old", "new"), REQUIREMENTS)
    def test_each_requirement(self, tmp_path: Path, words: str, old: str, new: str) -> None:
        Written(tmp_path, {old: new})
        info = found(tmp_path, trust_remote_code=True)
        with pytest.raises(UnsupportedModel, match=words):
            load_model(info, build_context(info))

    def test_an_encoder_says_that_it_is_one(self, tmp_path: Path) -> None:
        config = {"architectures": ["TinyModel"], "is_causal": False}
        for value, served in (("False", True), ("True", False)):
            folder = tmp_path / value
            folder.mkdir()
            Written(folder, {"is_causal = True": f"is_causal = {value}"}, config)
            info = found(folder, trust_remote_code=True)
            assert info.runner == "pooling"
            if served:
                load_model(info, build_context(info))
                continue
            with pytest.raises(UnsupportedModel, match="Encoder-only"):
                load_model(info, build_context(info))

    def test_ranks_need_a_plan(self, tmp_path: Path) -> None:
        Written(tmp_path, {"base_model_tp_plan = {": "not_a_plan = {"})
        info = found(tmp_path, trust_remote_code=True)

        def work(communicator: Any) -> Any:
            return load_model(info, build_context(info, communicator=communicator))

        with pytest.raises(UnsupportedModel, match="base_model_tp_plan"):
            run_ranks(2, work)

    @pytest.mark.parametrize("value", [3, "x", {"AutoModel": 4}, {"AutoModel": "x"}, []])
    def test_maps_that_are_none(self, tmp_path: Path, value: Any) -> None:
        Written(tmp_path, config={"auto_map": value})
        with pytest.raises((UnsupportedModel, ConfigError)):
            found(tmp_path, trust_remote_code=True)
