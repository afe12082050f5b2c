"""Checkpoints as their authors publish them: tiny weights under their names, beside their configs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import test_decoder_classifiers
import test_encoders
import test_pooling_decoders
import test_rotary_encoders
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_testing.model.decoders import Checkpoint

Names = Callable[[str], str]


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def bare(name: str) -> str:
    """Saved by Sentence Transformers: the encoder's own names."""
    return name.partition(".")[2]


def publish(
    folder: Path,
    *,
    config: Mapping[str, Any],
    names: Names = str,
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Turn what transformers saved into what is published."""
    saved = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", {**saved, **config})
    tensors = {
        names(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file({**tensors, **(more or {})}, folder / "model.safetensors", metadata={"format": "pt"})


def sentence_transformer(folder: Path, mode: str, *, length: int = 40) -> None:
    """The files of version 2, which most repositories have."""
    kinds = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
    write(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ],
    )
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    write(
        folder / "1_Pooling/config.json",
        {
            "word_embedding_dimension": 36,
            **{f"pooling_mode_{flag}": flag == mode for flag in flags},
        },
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})


class Published:
    """A suite's tiny model, published."""

    def __init__(self, suite: Any, folder: Path) -> None:
        self.suite, self.folder = suite, folder
        self.checkpoint: Checkpoint = suite.make_checkpoint(folder)

    def check(self, expected: Callable[[list[int]], Tensor], **settings: Any) -> Any:
        """Results for a few prompts, as input processing asks for them; returns what the checkpoint is."""
        info = self.suite.resolve(self.folder, **settings)
        assert info.pooling is not None
        prompts = self.suite.prompts()
        params = [self.suite.params(info.tasks[0]) for _ in prompts]
        for one in params:
            one.verify(info.tasks[0], info.pooling)
        model = self.suite.open(self.folder, max_model_len=None, runner="auto", **settings)
        for prompt, result in zip(prompts, self.suite.pooled(model, prompts, params)):
            self.suite.assert_close(result, expected(prompt))
        return info

    def states(self, prompt: list[int]) -> Tensor:
        return self.suite.expected(self.checkpoint, prompt)


class TestHeadsOfThePreTraining:
    """all-mpnet-base-v2, all-distilroberta-v1, multi-qa-distilbert: the config still names the model
    that guesses words; the weights are the encoder's."""

    @pytest.mark.parametrize(
        ("suite", "architecture"),
        [
            (test_encoders.TestMPNet, "MPNetForMaskedLM"),
            (test_encoders.TestRoberta, "RobertaForMaskedLM"),
            (test_encoders.TestXLMRoberta, "XLMRobertaForMaskedLM"),
            (test_encoders.TestDistilBert, "DistilBertForMaskedLM"),
            (test_encoders.TestBert, "BertForMaskedLM"),
            (test_rotary_encoders.TestModernBert, "ModernBertForMaskedLM"),
        ],
    )
    def test_they_embed(self, tmp_path: Path, suite: Any, architecture: str) -> None:
        found = Published(suite(), tmp_path)
        publish(tmp_path, config={"architectures": [architecture]})
        sentence_transformer(tmp_path, "mean_tokens")
        info = found.check(lambda prompt: normed(found.states(prompt).mean(0)))
        assert info.tasks == ("embed", "token_embed")
        assert info.max_model_len == 40

    def test_with_the_head_stored(self, tmp_path: Path) -> None:
        """As its model is trained on: the head is passed over."""
        found = Published(_MPNetWords(), tmp_path)
        sentence_transformer(tmp_path, "cls_token")
        found.check(lambda prompt: normed(found.states(prompt)[0]))

    def test_without_modules_the_encoder_embeds(self, tmp_path: Path) -> None:
        found = Published(_MPNetWords(), tmp_path)
        info = found.check(lambda prompt: normed(found.states(prompt)[0]))
        assert info.architecture == "MPNetModel"


class _MPNetWords(test_encoders.TestMPNet):
    def hf_class(self) -> Any:
        from transformers import MPNetForMaskedLM

        return MPNetForMaskedLM

    def expected(self, checkpoint: Checkpoint, prompt: Any) -> Tensor:
        with torch.inference_mode():
            states: Tensor = checkpoint.reference.mpnet(torch.tensor([list(prompt)]))[0][0]
        return states


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def test_gte_multilingual(tmp_path: Path) -> None:
    """Everything below ``new.``, and a classifier of tokens that only its authors' code asks."""
    found = Published(test_rotary_encoders.TestGteOfOneSegment(), tmp_path)
    publish(
        tmp_path,
        config={
            "architectures": ["NewModel", "NewForTokenClassification"],
            "model_type": "new",
            "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
            "layer_norm_type": "layer_norm",
            "logn_attention_clip1": False,
            "logn_attention_scale": False,
            "pack_qkv": True,
            "position_embedding_type": "rope",
            "unpad_inputs": False,
            "use_memory_efficient_attention": False,
        },
        names="new.{}".format,
        more={"classifier.weight": torch.ones(1, 48), "classifier.bias": torch.ones(1)},
    )
    sentence_transformer(tmp_path, "cls_token")
    overrides = {"architectures": ["GteNewModel"]}
    found.check(lambda prompt: normed(found.states(prompt)[0]), hf_overrides=overrides)


def test_nomic(tmp_path: Path) -> None:
    """nomic-embed-text-v1: the whole config."""
    found = Published(test_rotary_encoders.TestNomicBert(), tmp_path)
    own = {
        **test_rotary_encoders._OLD_NOMIC,
        "attn_pdrop": 0.0,
        "auto_map": {
            "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"
        },
        "bos_token_id": None,
        "causal": False,
        "eos_token_id": None,
        "fused_bias_fc": True,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "pad_vocab_size_multiple": 64,
        "parallel_block": False,
        "rotary_scaling_factor": 2,
        "scale_attn_weights": True,
        "torch_dtype": "float32",
        "use_flash_attn": True,
        "use_rms_norm": False,
    }
    write(tmp_path / "config.json", own)
    sentence_transformer(tmp_path, "mean_tokens")
    found.check(lambda prompt: normed(found.states(prompt).mean(0)))


class TestDecoders:
    """Qwen3-Embedding, e5-mistral, embeddinggemma: names without a prefix, the last token or the
    mean."""

    @pytest.mark.parametrize(
        ("suite", "architecture", "mode"),
        [
            (test_pooling_decoders.TestQwen3Model, "Qwen3ForCausalLM", "lasttoken"),
            (test_pooling_decoders.TestMistralModel, "MistralModel", "lasttoken"),
            (test_pooling_decoders.TestBidirectionalGemma3, "Gemma3TextModel", "mean_tokens"),
            (test_pooling_decoders.TestBidirectionalQwen2, "Qwen2ForCausalLM", "lasttoken"),
        ],
    )
    def test_they_embed(self, tmp_path: Path, suite: Any, architecture: str, mode: str) -> None:
        found = Published(suite(), tmp_path)
        publish(tmp_path, config={"architectures": [architecture]})
        sentence_transformer(tmp_path, mode)
        row = -1 if mode == "lasttoken" else slice(None)

        def expected(prompt: list[int]) -> Tensor:
            states = found.states(prompt)[row]
            return normed(states if states.dim() == 1 else states.mean(0))

        assert found.check(expected).runner == "pooling"


class TestCrossEncoders:
    @pytest.mark.parametrize("activation", ["Identity", None])
    def test_ms_marco(self, tmp_path: Path, activation: str | None) -> None:
        """The config names the activation; version 4 moved it into a block."""
        suite = test_encoders.TestBertForSequenceClassification()
        checkpoint = suite.make_checkpoint(tmp_path, num_labels=1)
        own: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if activation:
            path = f"torch.nn.modules.linear.{activation}"
            own["sentence_transformers"] = {"activation_fn": path, "version": "4.0.1"}
        publish(tmp_path, config=own)
        info = suite.resolve(tmp_path)
        assert info.tasks == ("classify", "score", "token_classify")
        prompts = suite.prompts()
        wanted = [suite.params("score", use_activation=True)] * len(prompts)
        for prompt, result in zip(prompts, suite.pooled(suite.open(tmp_path), prompts, wanted)):
            logits = suite.expected(checkpoint, prompt)
            suite.assert_close(result, logits if activation else logits.sigmoid())


@pytest.mark.parametrize(
    ("suite", "architecture"),
    [
        (test_encoders.TestBertForSequenceClassification, "BertModel"),
        (test_encoders.TestRobertaForSequenceClassification, "RobertaModel"),
        (test_encoders.TestDistilBertForSequenceClassification, "DistilBertModel"),
        (test_encoders.TestElectraForSequenceClassification, "ElectraModel"),
        (test_rotary_encoders.TestModernBertForSequenceClassification, "ModernBertModel"),
        (test_rotary_encoders.TestGteForSequenceClassification, "GteModel"),
        (test_decoder_classifiers.TestQwen3ForSequenceClassification, None),
    ],
)
def test_a_classifier_may_be_asked_to_embed(
    tmp_path: Path, suite: Any, architecture: str | None
) -> None:
    """Encoders by override, as the error of ``--convert embed`` says; decoders by ``--convert``."""
    found = Published(suite(), tmp_path)
    overrides = {"architectures": [architecture]}
    chosen: dict[str, Any] = {"hf_overrides": overrides} if architecture else {"convert": "embed"}
    info = found.suite.resolve(tmp_path, runner="pooling", **chosen)
    assert info.tasks == ("embed", "token_embed")
    prompts = found.suite.prompts()
    wanted = [found.suite.params("embed", normalize=False)] * len(prompts)
    model = found.suite.open(tmp_path, **chosen)
    base = found.checkpoint.reference.base_model
    row = 0 if architecture else -1
    for prompt, result in zip(prompts, found.suite.pooled(model, prompts, wanted)):
        extra: dict[str, Any] = {}
        if found.suite.segments:
            extra["token_type_ids"] = torch.tensor(found.suite.segment_ids([prompt]))
        with torch.inference_mode():
            states = base(torch.tensor([prompt]), **extra).last_hidden_state[0]
        found.suite.assert_close(result, states[row])
