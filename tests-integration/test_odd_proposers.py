"""Draft proposers that do what they should not, and settings of speculation that would do nothing."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from headrace import LLM, SamplingParams
from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError
from headrace_core.speculation import DraftProposer

SETTINGS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 4 << 20}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = "a b c d a b c d a b"


class Guest(DraftProposer):
    """Does what a test says."""

    proposes: ClassVar[Callable[[Any], Any]]
    ends: ClassVar[Callable[[Any], Any]]

    def __init__(self, settings: Any) -> None:
        if settings.get("fails"):
            raise ValueError("no table of guesses")

    def propose(self, tasks: Any) -> Any:
        return Guest.proposes(tasks)

    def finish(self, request_id: str, token_ids: Any, num_prompt_tokens: int) -> None:
        Guest.ends(token_ids)


class Unfinished(DraftProposer):
    """Lacks what a proposer must have."""


@pytest.fixture(scope="module", autouse=True)
def guests() -> None:
    made = {"guest": Guest, "unfinished": Unfinished, "function": overwrite}
    for name, plugin in made.items():
        plugins.register("headrace.draft_proposers", name, plugin)


def config(method: str = "guest", **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": 3, "adaptive": False, **more}


def written(**settings: Any) -> list[Any]:
    with LLM(**SETTINGS, **settings) as llm:
        outputs = [llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0] for _ in range(2)]
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return written()


def overwrite(tokens: Any) -> None:
    tokens[:] = 3


PROPOSES: dict[str, Callable[[Any], Any]] = {
    "writes into the tokens": lambda tasks: [overwrite(task.token_ids) or [] for task in tasks],
    "never ends": lambda tasks: [itertools.count(5) for _ in tasks],
    "ends the process": lambda tasks: sys.exit(3),
}


@pytest.mark.parametrize("does", PROPOSES)
def test_outputs_are_the_models(does: str, plain: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(Guest, "proposes", PROPOSES[does], raising=False)
    monkeypatch.setattr(Guest, "ends", lambda tokens: None, raising=False)
    assert written(speculative_config=config()) == plain


@pytest.mark.parametrize("ends", [overwrite, lambda tokens: sys.exit(3)], ids=["writes", "exits"])
def test_the_end_of_a_request_changes_none(
    ends: Callable[[Any], Any], plain: list[Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(Guest, "proposes", lambda tasks: [[] for _ in tasks], raising=False)
    monkeypatch.setattr(Guest, "ends", ends, raising=False)
    assert written(speculative_config=config()) == plain


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("function", {}, "'function': must be a subclass of DraftProposer, not <function"),
        ("unfinished", {}, "'unfinished' cannot be made: TypeError: .*abstract"),
        ("guest", {"fails": True}, "'guest' cannot be made: ValueError: no table of guesses"),
    ],
)
def test_a_plugin_that_is_no_proposer_is_named(
    method: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(PluginError, match=said):
        LLM(**SETTINGS, speculative_config=config(method, options=options))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**NGRAM, "prompt_lookup_min": 0}, r"prompt_lookup_min = 0: must be in 1\.\."),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 3},
         "suffix_decoding_max_tree_depth = 3: must be left out .*'ngram'.*'suffix'"),
        ({**NGRAM, "options": {"prompt_lookup_max": "x"}}, "options .*must be left out"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max = 3: must be left out"),
        ({"method": "suffix", "quantization": "fp8"}, "quantization = 'fp8': .*'draft_model'"),
        ({"method": "suffix", "revision": "main"}, "revision = 'main': must be left out"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("inf")},
         "suffix_decoding_max_spec_factor = inf: must be at most"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config.{said}"):
        LLM(**SETTINGS, speculative_config=given)


def test_a_model_that_writes_nothing_takes_no_guesses() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.method = 'suffix': .*no text"):
        LLM(**SETTINGS, runner="pooling", speculative_config={"method": "suffix"})
