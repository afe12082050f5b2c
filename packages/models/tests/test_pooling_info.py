"""What a checkpoint's files and the user's settings come to, through ``resolve``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from headrace_core import plugins
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, PluginError, UnsupportedModel
from headrace_core.model import ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_core.pooling import PairChat, PoolingInfo, PoolingTraits
from headrace_models.resolve import resolve

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 99, "hidden_size": 16,
    "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize",
             "type": "sentence_transformers.base.modules.normalize.Normalize"}  # fmt: skip
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
DENSE_CONFIG = {"in_features": 16, "out_features": 12, "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    return tmp_path


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def run(folder: Path, config: dict[str, Any] | None = None, **settings: Any) -> ModelInfo:
    write(folder, {"config.json": {**CONFIG, **(config or {})}})
    return resolve(ModelConfig(model=str(folder), **settings), LoadConfig(), CpuPlatform())


def pooling(folder: Path, config: dict[str, Any] | None = None, **settings: Any) -> PoolingInfo:
    info = run(folder, config, **settings)
    assert info.runner == "pooling"
    assert info.pooling is not None
    return info.pooling


def sentence_transformer(folder: Path, mode: Any = "mean", *more: dict[str, Any]) -> None:
    write(folder, {"modules.json": [*MODULES, *more], "1_Pooling/config.json": {
        "embedding_dimension": 16, "pooling_mode": mode, "include_prompt": True}})  # fmt: skip


LANGUAGE_MODEL = {"architectures": ["LlamaForCausalLM"], "type_vocab_size": 1}
LOGIT_SCORE = {"idx": 1, "name": "1", "path": "1_LogitScore",
               "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}  # fmt: skip


def logit_score(
    folder: Path, score: dict[str, Any], own: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """As the library stores a language model that reranks."""
    write(folder, {
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", **own},
        "modules.json": [*MODULES[:1], LOGIT_SCORE], "1_LogitScore/config.json": score,
    })  # fmt: skip


class TestTasks:
    def test_an_encoder_embeds(self, folder: Path) -> None:
        info = run(folder)
        assert info.tasks == ("embed", "token_embed")
        assert info.convert == "none"
        assert info.pooling is not None
        assert info.pooling.pooling_type == "CLS"
        assert info.pooling.embedding_size == 16
        assert info.pooling.scoring == "cosine"
        assert info.pooling.normalize
        assert not info.pooling.causal
        assert not info.pooling.reuses_prefixes

    def test_two_labels_do_not_score(self, folder: Path) -> None:
        info = pooling(folder, {"architectures": ["BertForSequenceClassification"]})
        assert info.tasks == ("classify", "token_classify")
        assert info.scoring == ""
        assert info.num_labels == 2
        assert info.embedding_size == 0

    def test_one_label_scores(self, folder: Path) -> None:
        config = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "fits"}}
        info = pooling(folder, config)
        assert info.tasks == ("classify", "score", "token_classify")
        assert info.scoring == "cross"
        assert info.labels == ("fits",)
        assert info.activation == "sigmoid"

    def test_labels_of_tokens(self, folder: Path) -> None:
        info = pooling(folder, {"architectures": ["BertForTokenClassification"], "num_labels": 5})
        assert info.tasks == ("token_classify",)
        assert info.pooling_type == "ALL"
        assert info.num_labels == 5
        assert info.labels == ()

    def test_all_rows_make_no_vector_of_the_prompt(self, folder: Path) -> None:
        assert pooling(folder, pooler_config={"pooling_type": "all"}).tasks == ("token_embed",)

    def test_a_generator_is_converted(self, folder: Path) -> None:
        config = {"architectures": ["LlamaForCausalLM"]}
        assert run(folder, config).pooling is None
        assert run(folder, config).tasks == ("generate",)
        info = run(folder, config, runner="pooling")
        assert (info.runner, info.convert) == ("pooling", "embed")
        assert info.pooling is not None
        assert info.pooling.pooling_type == "LAST"
        assert info.pooling.causal
        assert info.pooling.reuses_prefixes
        assert not info.pooling.token_types


class TestPrecedence:
    def test_user_over_files_over_class(self, folder: Path) -> None:
        assert pooling(folder).pooling_type == "CLS"
        sentence_transformer(folder, "mean")
        assert pooling(folder).pooling_type == "MEAN"
        assert pooling(folder, pooler_config={"pooling_type": "last"}).pooling_type == "LAST"

    def test_normalize_is_a_module(self, folder: Path) -> None:
        sentence_transformer(folder)
        assert not pooling(folder).normalize
        assert pooling(folder, pooler_config={"normalize": True}).normalize
        sentence_transformer(folder, "cls", NORMALIZE)
        assert pooling(folder).normalize
        assert not pooling(folder, pooler_config={"normalize": False}).normalize

    @pytest.mark.parametrize("kind", ["MEAN", "LAST", "STEP", "ALL"])
    def test_a_trained_head_takes_the_first_token(self, folder: Path, kind: str) -> None:
        config = {"architectures": ["BertForSequenceClassification"]}
        with pytest.raises(ConfigError, match=rf"pooling_type = '{kind}': must be one of CLS"):
            run(folder, config, pooler_config={"pooling_type": kind})

    def test_step_parameters_need_step(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"step_tag_id = 3.*pooling_type is STEP"):
            run(folder, pooler_config={"step_tag_id": 3})
        config = {"architectures": ["BertForTokenClassification"]}
        step = {"pooling_type": "STEP", "step_tag_id": 3, "returned_token_ids": [1, 0]}
        info = pooling(folder, config, pooler_config=step)
        assert (info.step_tag_id, info.returned_token_ids) == (3, (1, 0))

    def test_the_rest_of_the_users_settings(self, folder: Path) -> None:
        info = pooling(
            folder, pooler_config={"enable_chunked_processing": True, "max_embed_len": 3_072_000}
        )
        assert info.enable_chunked_processing
        assert info.max_embed_len == 3_072_000
        config = {"architectures": ["BertForSequenceClassification"]}
        info = pooling(folder, config, pooler_config={"logit_bias": 1.5, "softmax": False})
        assert info.logit_bias == 1.5
        assert not info.use_activation

    @pytest.mark.parametrize(
        ("architecture", "asked"),
        [
            ("BertModel", {"use_activation": False}),
            ("BertModel", {"logit_bias": 1.0}),
            ("BertModel", {"max_embed_len": 500}),
            ("BertModel", {"enable_chunked_processing": True, "pooling_type": "ALL"}),
            ("BertForSequenceClassification", {"normalize": False}),
            ("BertForSequenceClassification", {"enable_chunked_processing": True}),
            ("BertForSequenceClassification", {"max_embed_len": 500}),
            ("BertForTokenClassification", {"returned_token_ids": [2], "pooling_type": "STEP"}),
        ],
    )
    def test_what_the_model_has_no_use_for_is_refused(
        self, folder: Path, architecture: str, asked: dict[str, object]
    ) -> None:
        field = next(iter(asked))
        with pytest.raises(ConfigError, match=rf"pooler_config\.{field} = .*: must be "):
            run(folder, {"architectures": [architecture]}, pooler_config=asked)

    def test_unknown_key(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"pooler_config\.pool"):
            run(folder, pooler_config={"pool": "MEAN"})


class TestSizes:
    def test_support_comes_from_the_config_and_overrides(self, folder: Path) -> None:
        assert pooling(folder).matryoshka is None
        assert pooling(folder, {"is_matryoshka": True}).matryoshka == ()
        sizes = pooling(folder, hf_overrides={"matryoshka_dimensions": [4, 8]})
        assert sizes.matryoshka == (4, 8)

    @pytest.mark.parametrize("sizes", [[], [0], ["4"], 4, [True]])
    def test_sizes_must_be_sizes(self, folder: Path, sizes: object) -> None:
        with pytest.raises(UnsupportedModel, match="matryoshka_dimensions"):
            run(folder, {"matryoshka_dimensions": sizes})

    @pytest.mark.parametrize(
        ("config", "size", "words"),
        [({}, 4, "does not support matryoshka"), ({"is_matryoshka": True}, 17, "at most 16"),
         ({"matryoshka_dimensions": [4, 8]}, 5, r"one of \[4, 8\]")],
    )  # fmt: skip
    def test_the_users_default_must_fit(
        self, folder: Path, config: dict[str, Any], size: int, words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            run(folder, config, pooler_config={"dimensions": size})
        assert pooling(folder, {"is_matryoshka": True}, pooler_config={"dimensions": 4}).dimensions


class TestActivation:
    CLASSIFIER: ClassVar[dict[str, Any]] = {"architectures": ["BertForSequenceClassification"]}

    @pytest.mark.parametrize(
        ("config", "activation"),
        [
            ({}, "softmax"),
            ({"num_labels": 1}, "sigmoid"),
            ({"problem_type": "regression"}, "identity"),
            ({"problem_type": "multi_label_classification"}, "sigmoid"),
            ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
             "Identity"),
            ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"},
              "num_labels": 1}, "Tanh"),
        ],
    )  # fmt: skip
    def test_from_the_config(self, folder: Path, config: dict[str, Any], activation: str) -> None:
        assert pooling(folder, {**self.CLASSIFIER, **config}).activation == activation

    def test_from_the_cross_encoders_file(self, folder: Path) -> None:
        write(folder, {"config_sentence_transformers.json": {
            "model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}})  # fmt: skip
        assert pooling(folder, {**self.CLASSIFIER, "num_labels": 1}).activation == "Identity"

    @pytest.mark.parametrize(
        "name", ["os.system", "torch.nn.Module", "torch.load", "torchy.nn.Tanh", "Tanh", 3]
    )
    def test_only_activations_of_torch_are_named(self, folder: Path, name: object) -> None:
        with pytest.raises(UnsupportedModel, match="activation_fn"):
            run(folder, {**self.CLASSIFIER, "sentence_transformers": {"activation_fn": name}})


class TestSentenceTransformers:
    def test_old_and_new_files(self, folder: Path) -> None:
        sentence_transformer(folder, "lasttoken")
        assert pooling(folder).pooling_type == "LAST"
        old = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True,
               "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False}  # fmt: skip
        write(folder, {"1_Pooling/config.json": old})
        assert pooling(folder).pooling_type == "CLS"

    @pytest.mark.parametrize(
        ("mode", "name"),
        [("max", "max"), ("weightedmean", "weightedmean"), (["cls", "mean"], r"cls\+mean"),
         ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens")],
    )  # fmt: skip
    def test_modes_that_are_not_served(self, folder: Path, mode: Any, name: str) -> None:
        sentence_transformer(folder, mode)
        with pytest.raises(ConfigError, match=rf"'{name}' is not supported.*--pooler-config"):
            run(folder)
        assert pooling(folder, pooler_config={"pooling_type": "MEAN"}).pooling_type == "MEAN"

    def test_dense_layers(self, folder: Path) -> None:
        sentence_transformer(folder, "mean", DENSE, {**NORMALIZE, "idx": 3})
        write(folder, {"2_Dense/config.json": DENSE_CONFIG})
        info = pooling(folder)
        (dense,) = info.dense
        assert (dense.path, dense.out_features, dense.activation) == ("2_Dense", 12, "Tanh")
        assert info.embedding_size == 12
        assert info.normalize

    @pytest.mark.parametrize(
        ("change", "words"),
        [({"in_features": 17}, "in_features = 17: must be 16"),
         ({"activation_function": "evil.Function"}, "activation_function = 'evil.Function'"),
         ({"use_residual": True}, "use_residual"),
         ({"module_input_name": "token_embeddings"}, "module_input_name")],
    )  # fmt: skip
    def test_dense_layers_that_do_not_fit(
        self, folder: Path, change: dict[str, Any], words: str
    ) -> None:
        sentence_transformer(folder, "mean", DENSE)
        write(folder, {"2_Dense/config.json": {**DENSE_CONFIG, **change}})
        with pytest.raises(UnsupportedModel, match=words):
            run(folder)

    @pytest.mark.parametrize(
        ("module", "words"),
        [({**DENSE, "type": "custom_st.Transformer"}, "never run"),
         ({**DENSE, "type": "sentence_transformers.models.LSTM"}, "models.LSTM"),
         ({**MODULES[0], "path": "0_Transformer"}, "'0_Transformer': give that folder")],
    )  # fmt: skip
    def test_modules_that_are_not_served(
        self, folder: Path, module: dict[str, Any], words: str
    ) -> None:
        sentence_transformer(folder, "mean", module)
        with pytest.raises(ConfigError, match=words):
            run(folder)

    def test_modules_do_not_matter_to_who_generates(self, folder: Path) -> None:
        sentence_transformer(folder, "max")
        config = {"architectures": ["LlamaForCausalLM"]}
        assert run(folder, config, runner="generate").runner == "generate"
        with pytest.raises(ConfigError, match="'max'"):
            run(folder, config)

    def test_a_cross_encoder_scores_by_its_class(self, folder: Path) -> None:
        write(folder, {"config_sentence_transformers.json": {"model_type": "CrossEncoder"},
                       "modules.json": MODULES[:1]})  # fmt: skip
        config = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
        assert pooling(folder, config).scoring == "cross"
        write(folder, {"modules.json": [*MODULES, DENSE]})
        with pytest.raises(ConfigError, match="no more than a LogitScore besides"):
            run(folder, config)

    @pytest.mark.parametrize(
        ("score", "stated", "activation"),
        [
            (
                {"true_token_id": 5, "false_token_id": 3},
                "torch.nn.modules.linear.Identity",
                "Identity",
            ),
            ({"true_token_id": 5, "false_token_id": None}, None, "sigmoid"),
            ({"true_token_id": 5}, "torch.nn.modules.activation.Sigmoid", "Sigmoid"),
        ],
    )
    def test_a_language_model_with_a_logit_score(
        self, folder: Path, score: dict[str, Any], stated: str | None, activation: str
    ) -> None:
        logit_score(folder, score, {"activation_fn": stated})
        info = run(folder, LANGUAGE_MODEL)
        assert (info.runner, info.convert) == ("pooling", "classify")
        assert info.tasks == ("classify", "score", "token_classify")
        assert info.pooling is not None
        found = info.pooling
        assert (found.num_labels, found.labels, found.activation) == (1, (), activation)
        assert (found.pooling_type, found.scoring, found.pair_chat) == ("LAST", "cross", None)
        tokens = [3, 5] if score.get("false_token_id") else [5]
        assert info.config["classifier_from_token"] == tokens
        assert run(folder, LANGUAGE_MODEL, runner="generate").tasks == ("generate",)
        embeds = run(folder, LANGUAGE_MODEL, convert="embed")
        assert embeds.tasks == ("embed", "token_embed")

    def test_pairs_that_are_conversations(self, folder: Path) -> None:
        logit_score(folder, {"true_token_id": 5}, {"prompts": {"web": "Judge."},
                                                   "default_prompt_name": "web"})  # fmt: skip
        settings: dict[str, Any] = {"modality_config": {"text": {}, "message": {"format": "flat"}}}
        write(folder, {"sentence_bert_config.json": settings})
        found = pooling(folder, LANGUAGE_MODEL)
        assert (found.pair_chat, found.prompt_text(None)) == (PairChat("string"), "Judge.")
        arguments = {"add_generation_prompt": True, "enable_thinking": False}
        settings["processing_kwargs"] = {"chat_template": {**arguments, "restore_suffix": True}}
        write(folder, {"sentence_bert_config.json": settings})
        assert pooling(folder, LANGUAGE_MODEL).pair_chat == PairChat("string", arguments)
        for wrong, words in (
            (
                {"processing_kwargs": {"chat_template": "x"}},
                "chat_template = 'x': must be an object",
            ),
            ({"modality_config": [1]}, "modality_config = .* must be an object"),
            ({"modality_config": {"message": {"format": "flatter"}}}, "must be one of auto, flat"),
            ({"modality_config": {"message": [1]}}, r"format = \[1\]: must be one of auto, flat"),
        ):
            write(folder, {"sentence_bert_config.json": {**settings, **wrong}})
            with pytest.raises(UnsupportedModel, match=words):
                run(folder, LANGUAGE_MODEL)

    @pytest.mark.parametrize(
        ("score", "words"),
        [({"true_token_id": "yes"}, "true_token_id = 'yes'"), ({}, "true_token_id"),
         ({"true_token_id": 1, "false_token_id": -1}, "false_token_id = -1")],
    )  # fmt: skip
    def test_logit_scores_that_are_none(
        self, folder: Path, score: dict[str, Any], words: str
    ) -> None:
        logit_score(folder, score)
        with pytest.raises(UnsupportedModel, match=words):
            run(folder, LANGUAGE_MODEL)

    def test_a_logit_score_needs_a_language_model(self, folder: Path) -> None:
        logit_score(folder, {"true_token_id": 5})
        config = {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
        with pytest.raises(UnsupportedModel, match="must be that of a language model"):
            run(folder, config)

    @pytest.mark.parametrize("path", ["../elsewhere", "/etc"])
    def test_modules_are_within_the_checkpoint(self, folder: Path, path: str) -> None:
        sentence_transformer(folder, "mean", {**DENSE, "path": path})
        with pytest.raises(UnsupportedModel, match="within the checkpoint"):
            run(folder)

    @pytest.mark.parametrize("content", [{}, [3], [{"type": 1, "path": ""}], "x"])
    def test_a_broken_list_of_modules(self, folder: Path, content: object) -> None:
        write(folder, {"modules.json": content})
        with pytest.raises(UnsupportedModel, match=r"modules.json"):
            run(folder)

    def test_length_and_case(self, folder: Path) -> None:
        sentence_transformer(folder)
        write(folder, {"sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": True}})
        info = run(folder)
        assert info.pooling is not None
        assert (info.max_model_len, info.pooling.native_len) == (32, 32)
        assert info.pooling.lower_case
        assert run(folder, max_model_len=64).max_model_len == 64, "the model has the positions"

    @pytest.mark.parametrize("included", [True, False])
    def test_whether_a_prompt_is_pooled(self, folder: Path, included: bool) -> None:
        sentence_transformer(folder)
        config = {"embedding_dimension": 16, "pooling_mode": "mean", "include_prompt": included}
        write(folder, {"1_Pooling/config.json": config})
        assert pooling(folder).include_prompt is included
        write(folder, {"1_Pooling/config.json": {**config, "include_prompt": "no"}})
        with pytest.raises(UnsupportedModel, match="include_prompt = 'no'"):
            run(folder)

    def test_prompts(self, folder: Path) -> None:
        sentence_transformer(folder)
        write(folder, {"config_sentence_transformers.json": {"prompts": {"query": "q: "}}})
        assert pooling(folder).prompts == {"query": "q: "}
        assert pooling(folder).default_prompt_name is None

    def test_the_prompt_that_goes_without_saying(self, folder: Path) -> None:
        sentence_transformer(folder)
        own = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
        write(folder, {"config_sentence_transformers.json": own})
        assert pooling(folder).default_prompt_name == "query"
        for wrong in ("passage", ["query"]):
            own["default_prompt_name"] = wrong
            write(folder, {"config_sentence_transformers.json": own})
            with pytest.raises(UnsupportedModel, match=r"null or one of prompts, \['query'\]"):
                pooling(folder)


class TestPositions:
    ROBERTA: ClassVar[dict[str, Any]] = {
        "architectures": ["XLMRobertaModel"], "pad_token_id": 1, "type_vocab_size": 1,
    }  # fmt: skip

    def test_positions_behind_the_padding_token(self, folder: Path) -> None:
        assert run(folder, self.ROBERTA).max_model_len == 62
        with pytest.raises(ConfigError, match="at most 62"):
            run(folder, self.ROBERTA, max_model_len=63)

    def test_a_table_that_is_too_short(self, folder: Path) -> None:
        with pytest.raises(UnsupportedModel, match="above pad_token_id"):
            run(folder, {**self.ROBERTA, "max_position_embeddings": 2})

    def test_one_segment_is_none(self, folder: Path) -> None:
        assert not pooling(folder, self.ROBERTA).token_types
        info = pooling(folder)
        assert info.token_types
        assert info.max_token_types == 2


class Foreign:
    """A class of another distribution; it reads a checkpoint in its own way."""

    pooling_traits: ClassVar[Any] = PoolingTraits("embed", "MEAN", ("MEAN",))


class Mistaken:
    pooling_traits: ClassVar[Any] = "embed"


class TestOtherDistributions:
    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
        group = "headrace.models"
        plugin = plugins.Plugin(group, "TheirModel", f"{__name__}:{name}", "theirs 1.0")
        known = {**plugins.installed(group), "TheirModel": plugin}
        monkeypatch.setattr(plugins, "installed", lambda _: known)
        return {"architectures": ["TheirModel"]}

    def test_a_class_says_itself_how_it_pools(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = self.install(monkeypatch, "Foreign")
        info = run(folder, config)
        assert (info.runner, info.convert, info.source) == ("pooling", "none", "plugin:theirs 1.0")
        assert info.pooling is not None
        assert info.pooling.pooling_type == "MEAN"
        with pytest.raises(ConfigError, match="must be one of MEAN"):
            run(folder, config, pooler_config={"pooling_type": "CLS"})

    def test_it_must_say_so_in_the_right_form(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = self.install(monkeypatch, "Mistaken")
        with pytest.raises(PluginError, match=r"Mistaken.pooling_traits = 'embed'"):
            run(folder, config)


def test_dtype_of_the_head(folder: Path) -> None:
    assert pooling(folder, dtype="bfloat16").head_dtype == "float32"
    overrides = {"head_dtype": "model"}
    assert pooling(folder, dtype="bfloat16", hf_overrides=overrides).head_dtype == "bfloat16"
    with pytest.raises(UnsupportedModel, match="head_dtype = 'float8'"):
        run(folder, hf_overrides={"head_dtype": "float8"})
