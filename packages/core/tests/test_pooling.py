from __future__ import annotations

import logging
from typing import Any

import pytest

from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError, RequestError
from headrace_core.pooling import (
    POOLING_TASKS,
    PoolerConfig,
    PoolingInfo,
    PoolingParams,
)
from headrace_core.pooling.params import _warn_of_old_name
from headrace_core.sampling.params import RequestOutputKind
from headrace_testing.fakes.engine import fake_served_model


def info(**changes: Any) -> PoolingInfo:
    values: dict[str, Any] = {
        "tasks": POOLING_TASKS, "pooling_type": "LAST", "causal": True, "embedding_size": 8,
        "num_labels": 4, **changes,
    }  # fmt: skip
    return PoolingInfo(**values)


def verified(task: str, model: PoolingInfo | None = None, /, **asked: Any) -> PoolingParams:
    params = PoolingParams(**asked)
    params.verify(task, model, "my-model")
    return params


@pytest.mark.parametrize(
    ("task", "model", "asked", "want"),
    [
        # 1: the task is the call's.
        ("embed", None, {}, {"task": "embed", "normalize": True}),
        ("embed", None, {"task": "embed"}, {"task": "embed"}),
        # 2: old names.
        ("classify", None, {"softmax": False}, {"use_activation": False, "softmax": None}),
        ("score", None, {"activation": False, "use_activation": True}, {"use_activation": True}),
        # 3: a plug-in checks its own parameters.
        ("plugin", info(), {"dimensions": -5}, {"skip_reading_prefix_cache": True}),
        ("plugin", info(), {"skip_reading_prefix_cache": False},
         {"skip_reading_prefix_cache": False}),
        # 4: what the model says, for the task's own parameters.
        ("embed", info(normalize=False), {}, {"normalize": False, "use_activation": None}),
        ("token_embed", info(dimensions=4, matryoshka=()), {}, {"dimensions": 4}),
        ("embed", info(dimensions=4, matryoshka=()), {"dimensions": 2}, {"dimensions": 2}),
        ("token_classify", info(use_activation=False, normalize=False), {},
         {"use_activation": False, "normalize": None}),
        # 5: rows of tokens read no cached prefix.
        ("token_embed", info(), {}, {"skip_reading_prefix_cache": True}),
        ("token_classify", info(), {}, {"skip_reading_prefix_cache": True}),
        ("embed", info(), {}, {"skip_reading_prefix_cache": False}),
        ("token_embed", None, {}, {"skip_reading_prefix_cache": False}),
        # 6: steps.
        ("token_classify", info(pooling_type="STEP", step_tag_id=7, returned_token_ids=(1, 2)), {},
         {"step_tag_id": 7, "returned_token_ids": [1, 2]}),
        ("token_classify", info(pooling_type="STEP", step_tag_id=7), {"step_tag_id": 3},
         {"step_tag_id": 3}),
        # 7: what nobody says.
        ("score", info(), {}, {"use_activation": True, "normalize": None}),
        # 8: sizes.
        ("embed", info(matryoshka=()), {"dimensions": 8}, {"dimensions": 8}),
        ("embed", info(matryoshka=(2, 4)), {"dimensions": 4}, {"dimensions": 4}),
    ],
)  # fmt: skip
def test_what_is_filled_in(
    task: str, model: PoolingInfo | None, asked: dict[str, Any], want: dict[str, Any]
) -> None:
    params = verified(task, model, **asked)
    assert {name: getattr(params, name) for name in want} == want


@pytest.mark.parametrize(
    ("task", "model", "asked", "message"),
    [
        ("embed", None, {"task": "classify"}, "task = 'classify': must be 'embed'"),
        ("vector", None, {}, "Unknown pooling task"),
        ("embed", info(), {"step_tag_id": 3}, r"step_tag_id: .*\['dimensions', 'normalize', "),
        ("classify", info(), {"returned_token_ids": [1]}, "returned_token_ids: must be left out"),
        ("embed", None, {"dimensions": 0}, "greater than 0"),
        ("embed", info(), {"dimensions": 4}, "'my-model' does not support matryoshka"),
        ("embed", info(matryoshka=(2, 4)), {"dimensions": 3}, r"one of \[2, 4\]"),
        ("embed", info(matryoshka=()), {"dimensions": 9}, "at most 8"),
        ("embed", info(), {"use_activation": True}, "use_activation: must be left out"),
        ("classify", None, {"normalize": True}, r"normalize: .*\['use_activation'\]"),
        ("score", info(), {"dimensions": 4}, "dimensions: must be left out"),
        ("embed", None, {"normalize": "no"}, "normalize = 'no': must be True, False or None"),
        ("token_classify", info(pooling_type="STEP"), {"returned_token_ids": [4]}, r"in 0\.\.3"),
        ("embed", info(), {"prompt_name": "query"}, "the checkpoint has no prompts"),
        ("embed", info(prompts={"b": "", "a": ""}), {"prompt_name": "c"}, r"one of \['a', 'b'\]"),
        ("embed", info(prompts={"b": ""}), {"prompt_name": ["b"]}, r"= \['b'\]: must be one of"),
        ("classify", info(prompts={"b": ""}), {"prompt_name": "b"}, "must be left out for task"),
    ],
)
def test_what_is_refused(
    task: str, model: PoolingInfo | None, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        verified(task, model, **asked)
    assert error.value.param in (*asked, "task")


@pytest.mark.parametrize("value", [0, -2, True, 1.5])
def test_a_prompt_is_cut_to_a_number_of_tokens(value: Any) -> None:
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        PoolingParams(truncate_prompt_tokens=value)


@pytest.mark.parametrize("value", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, 2])
def test_pooling_has_final_outputs_only(value: Any) -> None:
    with pytest.raises(RequestError, match=r"output_kind = .*: must be .*FINAL_ONLY") as caught:
        PoolingParams(output_kind=value)
    assert caught.value.param == "output_kind"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {1}}, "extra_kwargs.a"),
        ({"a": [object()]}, r"extra_kwargs.a\[0\]"),
        ([1], "a mapping"),
    ],
)
def test_extra_keywords_are_plain_data(value: Any, where: str) -> None:
    with pytest.raises(RequestError, match=where):
        PoolingParams(extra_kwargs=value)
    later = PoolingParams()
    later.extra_kwargs = value
    with pytest.raises(RequestError, match=where):
        later.verify("embed", None)


def test_extra_keywords_that_nobody_reads() -> None:
    asked = PoolingParams(extra_kwargs={"a": 1})
    for source in ("native", "transformers"):
        with pytest.raises(RequestError, match=r"extra_kwargs = {'a': 1}: must be left out") as e:
            fake_served_model(source=source).check_extra_kwargs(asked)
        assert e.value.param == "extra_kwargs"
    fake_served_model(source="plugin:theirs").check_extra_kwargs(asked)
    fake_served_model().check_extra_kwargs(PoolingParams(extra_kwargs={}))


def test_whether_ids_are_needed_is_said_by_a_flag() -> None:
    assert verified("embed", None, requires_token_ids=True).requires_token_ids
    with pytest.raises(RequestError, match="requires_token_ids = 'no': must be True or False"):
        verified("embed", None, requires_token_ids="no")


def test_old_names_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_old_name.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            verified("classify", None, softmax=True)
    assert len(caplog.records) == 1


def test_a_clone_shares_nothing() -> None:
    params = PoolingParams(returned_token_ids=[1], extra_kwargs={"a": [1]})
    clone = params.clone()
    assert clone.returned_token_ids is not None
    assert clone.extra_kwargs is not None
    clone.returned_token_ids.append(2)
    clone.extra_kwargs["a"].append(2)
    assert params == PoolingParams(returned_token_ids=[1], extra_kwargs={"a": [1]})


class TestPoolerConfig:
    def test_names_in_any_case_and_old_ones(self) -> None:
        config = PoolerConfig.from_mapping({"pooling_type": "mean", "softmax": False})
        assert (config.pooling_type, config.use_activation) == ("MEAN", False)
        assert PoolerConfig(activation=False, use_activation=True).use_activation

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"pool": 1}, r"pooler_config\.pool = 1: .*pooling_type"),
            ({"pooling_type": "MAX"}, "must be one of null, LAST"),
            ({"normalize": 1}, "null, True, False"),
            ({"dimensions": 0}, "at least 1"),
            ({"max_embed_len": "9"}, "a whole number"),
            ({"step_tag_id": -1}, "at least 0"),
            ({"logit_bias": True}, "a number"),
            ({"logit_bias": float("nan")}, "= nan: must be a number"),
            ({"logit_bias": 10**400}, "a number that float32 holds"),
            ({"returned_token_ids": []}, "a list of token ids"),
            ({"returned_token_ids": [1, -1]}, "at least 0"),
        ],
    )
    def test_refusals_name_field_and_what_it_may_be(
        self, values: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            PoolerConfig.from_mapping(values)
        assert error.value.field == f"pooler_config.{next(iter(values))}"

    @pytest.mark.parametrize(
        ("given", "fields"),
        [
            (None, {}),
            ({"normalize": False}, {"normalize": False}),
            (PoolerConfig(pooling_type="mean"), {"pooling_type": "MEAN"}),
        ],
    )
    def test_python_may_give_it_in_three_ways(self, given: Any, fields: dict[str, Any]) -> None:
        config = ModelConfig(model="x", pooler_config=given)
        assert config.pooler_config == fields
        assert config.pooler == PoolerConfig(**fields)

    def test_anything_else_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="pooler_config = 'MEAN': must be a JSON object"):
            ModelConfig(model="x", pooler_config="MEAN")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("causal", "kind", "chunks", "reuses"),
    [(True, "LAST", True, True), (True, "MEAN", True, False), (True, "ALL", True, False),
     (False, "LAST", False, False)],
)  # fmt: skip
def test_which_models_compute_in_chunks_and_reuse(
    causal: bool, kind: str, chunks: bool, reuses: bool
) -> None:
    model = info(causal=causal, pooling_type=kind)
    assert (model.chunks, model.reuses_prefixes) == (chunks, reuses)
