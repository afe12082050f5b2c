"""Whatever stands in a config.json: a model, or an error that headrace raises on purpose."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_families as families
import test_gated_families as gated
import test_gpt_families as gpts
import test_more_families as more
import test_other_recurrences as others
import test_qwen2_audio
import test_recurrent_families as recurrent
import test_relaid_families as relaid
import test_rotary_encoders as rotary
import test_whisper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_core.errors import ConfigError, ModelError
from headrace_models.loading.loader import load_model
from headrace_testing.model.decoders import build_context

pytestmark = pytest.mark.req("SEC-22")


class _Whisper:
    """A family that is not compared by the suite of the others."""

    def make_checkpoint(self, folder: Path) -> Any:
        test_whisper.make(folder)
        return SimpleNamespace(path=folder)

    def resolve(self, path: Path) -> Any:
        return test_whisper.resolved(path)

    def load(self, info: Any, context: Any) -> Any:
        return load_model(info, context)


SUITES: dict[str, Any] = {
    name: suite()
    for name, suite in vars(families).items()
    if name in ("TestLlama", "TestQwen2", "TestGemma3", "TestPhi3", "TestGPT2", "TestMixtral")
}
SUITES.update(
    {
        name: getattr(gated, f"Test{name}")()
        for name in ("Exaone4", "Gemma3n", "Gemma4Experts", "GraniteSWA", "Ministral3", "SmolLM3")
    }
)
SUITES.update(
    {name: getattr(gpts, f"Test{name}")() for name in ("Falcon40B", "GPTNeo", "Mpt", "XGLM")}
)
SUITES.update(
    {name: getattr(relaid, f"Test{name}")() for name in ("Deci7B", "IQuestLoop", "Plamo3", "Solar")}
)
SUITES.update(ModernBert=rotary.TestModernBertForSequenceClassification())
SUITES.update(NomicBert=rotary.TestNomicBert(), Gte=rotary.TestGteForSequenceClassification())
SUITES.update(Qwen2Audio=test_qwen2_audio.TestText(), Whisper=_Whisper())
SUITES.update(Jamba=recurrent.TestJamba(), Qwen3Next=recurrent.TestQwen3Next())
SUITES.update(NemotronH=recurrent.TestNemotronHMixture(), Kimi=others.TestKimiLinear())
SUITES.update(
    {name: getattr(more, f"Test{name}")() for name in ("Grok2", "JetMoe", "MiMoV2FlashAsPublished")}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 100) | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from([10**12, 2**63, -(10**400), 10**400, "silu", "yarn", "longrope", "linear"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "x"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
IRRELEVANT = {"architectures", "transformers_version", "use_cache", "model_type", "hf_overrides"}


@pytest.fixture(scope="module")
def configs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Makes a suite's checkpoint once; returns its folder and config."""

    @functools.cache
    def made(name: str) -> tuple[Path, dict[str, Any]]:
        path = SUITES[name].make_checkpoint(tmp_path_factory.mktemp(name)).path
        return path, json.loads((path / "config.json").read_text())

    return made


@pytest.mark.keep(11, every_value=False)
@pytest.mark.parametrize("name", SUITES)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_one_wrong_value(name: str, data: st.DataObject, configs: Any) -> None:
    path, config = configs(name)
    key = data.draw(st.sampled_from(sorted(set(config) - IRRELEVANT)))
    changed = {**config, key: data.draw(JSON)}
    if isinstance(config[key], dict) and data.draw(st.booleans()):
        inner = data.draw(st.sampled_from(sorted(config[key])))
        changed[key] = {**config[key], inner: data.draw(JSON)}
    (path / "config.json").write_text(json.dumps(changed))
    try:
        info = SUITES[name].resolve(path)
        SUITES[name].load(info, build_context(info))
    except (ConfigError, ModelError):
        pass
