"""A whole run under the guards: nothing is asked of the network, unpickled, or left behind."""

from __future__ import annotations

import pytest

from headrace import LLM, SamplingParams
from headrace_testing.guards.fixtures import no_leaks, no_network, no_pickles  # noqa: F401


@pytest.mark.req("REL-18")
@pytest.mark.req("REL-10")
@pytest.mark.req("SEC-01")
@pytest.mark.parametrize("engine_process", [False, True], ids=["thread", "process"])
@pytest.mark.usefixtures("no_network", "no_pickles", "no_leaks")
def test_a_model_in_a_folder(engine_process):
    with LLM(device="sim", sim_step_ms=0.0, engine_process=engine_process) as llm:
        [output] = llm.generate(["Hello"], SamplingParams(max_tokens=20, seed=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 20


@pytest.mark.req("REL-18")
@pytest.mark.req("SEC-01")
@pytest.mark.usefixtures("no_network", "no_pickles")
def test_a_real_model_in_a_folder():
    with LLM() as llm:
        [output] = llm.generate(["Hello"], SamplingParams(max_tokens=4))
    assert output.outputs[0].token_ids
