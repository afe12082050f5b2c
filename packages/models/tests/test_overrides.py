from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_models.config.overrides import merged, overridden

STATED: dict[str, Any] = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_nested_overrides_merge() -> None:
    before = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert merged(before, {"a": {"c": {"f": 4}}, "e": {"g": 5}}) == {
        "a": {"b": 1, "c": {"d": 2, "f": 4}}, "e": {"g": 5},
    }  # fmt: skip
    assert before == STATED


class TestFunction:
    def test_what_it_returns_replaces_the_config(self) -> None:
        assert overridden(STATED, lambda config: {"e": config["e"] + 1}) == {"e": 4}

    def test_none_says_that_it_changed_its_copy(self) -> None:
        def change(config: dict[str, Any]) -> None:
            config["a"]["c"]["d"] = (5, 6)
            del config["e"]

        assert overridden(STATED, change) == {"a": {"b": 1, "c": {"d": [5, 6]}}}
        assert STATED == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}

    @pytest.mark.parametrize("returned", [3, "x", [("a", 1)], True])
    def test_no_mapping(self, returned: object) -> None:
        with pytest.raises(ConfigError, match=r"hf_overrides: .*<lambda> returned .* mapping") as e:
            overridden(STATED, lambda config: returned)
        assert e.value.field == "model.hf_overrides"

    @pytest.mark.parametrize("value", [{1, 2}, object(), STATED.get])
    def test_what_json_cannot_say(self, value: object) -> None:
        with pytest.raises(
            ConfigError, match=r"hf_overrides: .* returned values that JSON cannot express"
        ):
            overridden(STATED, lambda config: {"a": value})

    def test_an_exception_is_the_cause(self) -> None:
        with pytest.raises(ConfigError, match=r"hf_overrides: .* failed: KeyError: 'z'") as caught:
            overridden(STATED, lambda config: config["z"])
        assert isinstance(caught.value.__cause__, KeyError)
