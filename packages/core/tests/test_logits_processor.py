"""The user's side of logits processors: state by slot, adapters, finding classes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core import logits_processor, plugins
from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError, PluginLoadError
from headrace_core.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    ForbiddenWords,
    LogitsProcessor,
    MoveDirectionality,
    load_processors,
    process_dict_updates,
    processor_name,
)
from headrace_core.sampling import SamplingParams

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


class Nothing(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits


class Other(Nothing):
    class Inner(Nothing):
        pass


NOT_A_PROCESSOR = object


def params(name: str | None) -> SamplingParams:
    return SamplingParams(extra_args=None if name is None else {"name": name})


def add(slot: int, name: str | None) -> tuple[int, SamplingParams, None, list[int]]:
    return (slot, params(name), None, [])


def state_of(p: SamplingParams, prompt: list[int] | None, output: list[int]) -> str | None:
    return None if p.extra_args is None else p.extra_args["name"]


@pytest.mark.spec("ENGINE-LOGITSPROC")
@pytest.mark.parametrize(
    ("before", "update", "after", "changed"),
    [
        ({0: "a"}, None, {0: "a"}, False),
        ({0: "a", 2: "c"}, BatchUpdate(2, removed=[2]), {0: "a"}, True),
        ({0: "a"}, BatchUpdate(2, removed=[1]), {0: "a"}, False),
        # Adding to an occupied slot drops who was there, whether or not the new one has a state.
        ({0: "a"}, BatchUpdate(1, added=[add(0, "b")]), {0: "b"}, True),
        ({0: "a"}, BatchUpdate(1, added=[add(0, None)]), {}, True),
        ({0: "a"}, BatchUpdate(2, added=[add(1, None)]), {0: "a"}, False),
        # A one-way move empties its source and discards whom it meets; a swap does neither.
        ({0: "a", 3: "d"}, BatchUpdate(1, moved=[(3, 0, ONE_WAY)]), {0: "d"}, True),
        ({0: "a"}, BatchUpdate(1, moved=[(3, 0, ONE_WAY)]), {}, True),
        ({0: "a", 3: "d"}, BatchUpdate(4, moved=[(3, 0, SWAP)]), {0: "d", 3: "a"}, True),
        ({0: "a"}, BatchUpdate(4, moved=[(3, 0, SWAP)]), {3: "a"}, True),
        ({}, BatchUpdate(4, moved=[(3, 0, SWAP)]), {}, False),
        # The spec's worked cases: one new, two gone, one swap; two new, one gone, one swap.
        ({0: "a", 1: "b", 2: "c", 3: "d"},
         BatchUpdate(3, removed=[3], added=[add(1, "e")], moved=[(0, 2, SWAP)]),
         {0: "c", 1: "e", 2: "a"}, True),
        ({0: "a", 1: "b"},
         BatchUpdate(3, added=[add(0, "c"), add(2, "d")], moved=[(0, 2, SWAP)]),
         {0: "d", 1: "b", 2: "c"}, True),
        # The slot of an added request is that before any move.
        ({1: "b"}, BatchUpdate(2, removed=[0], added=[add(2, "c")], moved=[(2, 0, ONE_WAY)]),
         {0: "c", 1: "b"}, True),
    ],
)  # fmt: skip
def test_states_follow_the_batch(before: Any, update: Any, after: Any, changed: bool) -> None:
    states = dict(before)
    assert process_dict_updates(states, update, state_of) is changed
    assert states == after


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 5), st.booleans()),
            st.tuples(st.just("remove"), st.integers(0, 5)),
            st.tuples(st.just("move"), st.integers(0, 5), st.integers(0, 5), st.booleans()),
        ),
        max_size=40,
    )
)
def test_states_equal_a_list_of_slots(steps: list[Any]) -> None:
    """A dense list of slots, with None for empty ones, is the oracle."""
    dense: list[str | None] = [None] * 6
    states: dict[int, str] = {}
    for number, (kind, first, *rest) in enumerate(steps):
        if kind == "add":
            name = f"r{number}" if rest[0] else None
            dense[first] = name
            update = BatchUpdate(6, added=[add(first, name)])
        elif kind == "remove":
            dense[first] = None
            update = BatchUpdate(6, removed=[first])
        else:
            second, swaps = rest
            if first == second:
                continue
            if swaps:
                dense[first], dense[second] = dense[second], dense[first]
            else:
                dense[second], dense[first] = dense[first], None
            update = BatchUpdate(6, moved=[(first, second, SWAP if swaps else ONE_WAY)])
        process_dict_updates(states, update, state_of)
        assert states == {slot: name for slot, name in enumerate(dense) if name is not None}


class Adapted(AdapterLogitsProcessor):
    """Rows here are any objects: the adapter only hands them over."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        kind = (params.extra_args or {}).get("kind")
        return {
            None: None,
            "two": lambda output, row: (row, list(output)),
            "three": lambda prompt, output, row: (row, list(prompt), list(output)),
            "one": lambda row: row,
        }[kind]


@pytest.mark.spec("LOGITSPROC-ADAPTER")
def test_an_adapter_hands_rows_to_the_requests_own_rules() -> None:
    adapter = Adapted(None, None, False)  # type: ignore[arg-type]
    output: list[int] = [7]
    added = [
        (slot, SamplingParams(extra_args=None if kind is None else {"kind": kind}), prompt, output)
        for slot, (kind, prompt) in enumerate(
            [("two", [1]), (None, [2]), ("three", [3]), ("three", None)]
        )
    ]
    adapter.update_state(BatchUpdate(4, added=added))
    output.append(8)  # the list is live
    assert adapter.apply(["a", "b", "c", "d"]) == [
        ("a", [7, 8]), "b", ("c", [3], [7, 8]), ("d", [], [7, 8]),
    ]  # fmt: skip
    adapter.update_state(BatchUpdate(2, removed=[0, 2], moved=[(3, 0, ONE_WAY)]))
    assert adapter.apply(["a", "b"]) == [("a", [], [7, 8]), "b"]
    adapter.update_state(None)
    adapter.update_state(BatchUpdate(1, removed=[0], moved=[(1, 0, ONE_WAY)]))
    assert adapter.apply(["a"]) == ["a"]
    bad = SamplingParams(extra_args={"kind": "one"})
    with pytest.raises(TypeError, match=r"Adapted.*1 arguments"):
        adapter.update_state(BatchUpdate(2, added=[(1, bad, [1], [])]))


@pytest.mark.spec("LOGITSPROC-LOAD")
def test_classes_and_names_are_loaded_once_in_order() -> None:
    here = __name__
    found = load_processors([Other, f"{here}:Nothing", f"{here}:Other", f"{here}:Other.Inner"])
    assert found == (Other, Nothing, Other.Inner)
    assert load_processors(()) == ()


@pytest.mark.spec("LOGITSPROC-LOAD")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no.such.module:Thing", "could not be imported"),
        (f"{__name__}:Missing", "has no 'Missing'"),
        (f"{__name__}:NOT_A_PROCESSOR", "not a subclass"),
        (f"{__name__}.Nothing", "not a class name"),
        (":Nothing", "not a class name"),
        (object, "not a subclass"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_processors([name])
    assert str(name) in str(caught.value)
    assert caught.value.field == "model.logits_processors"


@pytest.mark.spec("LOGITSPROC-LOAD")
def test_installed_plugins_are_always_loaded_and_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(target: str) -> Any:
        plugin = plugins.Plugin(logits_processor.GROUP, "mine", target, "a-package 1.0")
        return lambda group: {"mine": plugin} if group == logits_processor.GROUP else {}

    monkeypatch.setattr(plugins, "installed", installed(f"{__name__}:Nothing"))
    assert load_processors([Other]) == (Nothing, Other)
    monkeypatch.setattr(plugins, "installed", installed(f"{__name__}:NOT_A_PROCESSOR"))
    with pytest.raises(ConfigError, match="NOT_A_PROCESSOR"):
        load_processors([])
    monkeypatch.setattr(plugins, "installed", installed("no.such.module:Thing"))
    with pytest.raises(PluginLoadError, match=r"no\.such\.module"):
        load_processors([])


def test_names_for_another_process() -> None:
    class Local(Nothing):
        pass

    assert processor_name(Other.Inner) == f"{__name__}:Other.Inner"
    assert processor_name("a.b:C") == "a.b:C"
    with pytest.raises(ConfigError, match="cannot be imported by another process"):
        processor_name(Local)


class Row(list):  # type: ignore[type-arg]
    """As much of a tensor as a rule for a row needs."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


@pytest.mark.spec("ENGINE-LOGITSPROC")
def test_forbidden_words() -> None:
    rule = ForbiddenWords([[1], [2, 3], [2, 2, 4], []])

    def impossible(*output: int) -> set[int]:
        row = rule(list(output), Row([0.0] * 6))  # type: ignore[arg-type]
        return {i for i, value in enumerate(row) if value == float("-inf")}

    assert impossible() == {1}
    assert impossible(2) == {1, 3}
    assert impossible(2, 2) == {1, 3, 4}
    assert impossible(2, 5) == {1}
    with pytest.raises(ValueError, match=r"\[-1, 9\]: must be in 0..5"):
        ForbiddenWords([[9, 1], [-1]])([], Row([0.0] * 6))  # type: ignore[arg-type]


@pytest.mark.spec("LOGITSPROC-LOAD")
def test_one_processor_needs_no_list_and_others_are_refused() -> None:
    assert ModelConfig(logits_processors="a.b:C").logits_processors == ("a.b:C",)  # type: ignore[arg-type]
    assert ModelConfig(logits_processors=Other).logits_processors == (Other,)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="logits_processors = 3"):
        ModelConfig(logits_processors=(3,))
