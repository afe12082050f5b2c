"""The conformance suite on every backend whose library is installed."""

import pytest

from headrace_core.grammar import GrammarSpec
from headrace_core.testing.grammar import GrammarConformance
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.backends.lm_format_enforcer import EnforcerBackend
from headrace_engine.structured.backends.outlines import OutlinesBackend
from headrace_engine.structured.backends.xgrammar import XGrammarBackend


class TestGuidance(GrammarConformance):
    backend = GuidanceBackend


class TestXGrammar(GrammarConformance):
    backend = XGrammarBackend

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip(
            "xgrammar", reason="pip install 'headrace-engine[xgrammar]'", exc_type=ImportError
        )


class TestOutlines(GrammarConformance):
    backend = OutlinesBackend
    kinds = frozenset({"json", "json_object", "regex", "choice"})
    goes_on = False

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("outlines_core", reason="pip install 'headrace-engine[outlines]'")


class TestEnforcer(GrammarConformance):
    backend = EnforcerBackend
    kinds = frozenset({"json", "regex", "choice"})
    whole_characters = True

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip(
            "lmformatenforcer", reason="pip install 'headrace-engine[lm-format-enforcer]'"
        )


@pytest.mark.spec("SO-API")
def test_the_others_say_what_they_have_not():
    def refusal(backend, kind, **options):
        return backend.refuse(GrammarSpec(backend.name, kind, "{}", **options))

    assert refusal(OutlinesBackend, "grammar")
    assert refusal(EnforcerBackend, "structural_tag")
    assert refusal(XGrammarBackend, "json", whitespace_pattern="[ ]?")
    assert refusal(OutlinesBackend, "json", any_whitespace=False)
