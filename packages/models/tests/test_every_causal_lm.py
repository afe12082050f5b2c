"""All that transformers has as causal language models: each is served, exactly, or refused with a reason.

What came of each stands in ``transformers_models.json``, of which docs/supported/transformers.md is made
(``python tools/transformers_page.py``); a change of either side shows here.
"""

from __future__ import annotations

import every_causal_lm
import pytest
import transformers
from every_causal_lm import SERVED, Outcome

from headrace_testing.sampling import todays

pytestmark = pytest.mark.filterwarnings("ignore")  # of model code that is not ours


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("models")
    kinds = todays(every_causal_lm.model_types(), days=3)
    return {outcome.model_type: outcome for outcome in every_causal_lm.outcomes(folder, kinds)}


def test_none_is_served_wrongly(found: dict[str, Outcome]) -> None:
    wrong = [o for o in found.values() if o.result.startswith("DIFFERS")]
    assert wrong == []


def test_each_that_is_refused_has_a_reason(found: dict[str, Outcome]) -> None:
    assert [o for o in found.values() if not o.result or "\n" in o.result] == []


def test_the_published_table_is_what_was_found(found: dict[str, Outcome]) -> None:
    stored = every_causal_lm.stored()
    known = {kind: outcome for kind, outcome in found.items() if kind in stored}
    assert known == {kind: stored[kind] for kind in known}
    if transformers.__version__ == every_causal_lm.measured_with():
        assert set(every_causal_lm.model_types()) == set(stored)


def test_most_are_served() -> None:
    assert sum(o.result == SERVED for o in every_causal_lm.stored().values()) >= 100
