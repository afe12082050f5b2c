"""Media that are embedded with the adapters of their requests: vectors are kept apart, by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.lora import LoRARequest
from headrace_core.multimodal import MediaInput
from headrace_engine.config import EngineConfig, MultiModalConfig
from headrace_engine.execution.media_vectors import MediaVectors
from headrace_engine.lora.config import LoRAConfig
from headrace_engine.lora.step_adapters import StepAdapters


class Tower:
    """Slots, and a tower whose vectors are the slot's number; 0: it has none."""

    num_slots, num_bytes, runs_eagerly = 2, 0, False

    def __init__(self) -> None:
        self.slot: int | None = None
        self.ran: list[tuple[list[str], int | None]] = []

    def choose_media(self, slot: int | None) -> None:
        self.slot = slot

    def place(self, slot: int, adapter: Any) -> None:
        assert self.slot is None

    def embed(self, items: Sequence[MediaInput]) -> list[Tensor]:
        self.ran.append(([item.content_hash for item in items], self.slot))
        if any(item.content_hash == "bad" for item in items):
            raise ValueError("bad")
        number = 0.0 if self.slot is None else self.slot + 1.0
        return [torch.full((item.num_vectors, 2), number) for item in items]


CONTENTS = {
    1: SimpleNamespace(digest="one", changes_media=True),
    2: SimpleNamespace(digest="two", changes_media=True),
    3: SimpleNamespace(digest="text", changes_media=False),
}


def lora(number: int) -> LoRARequest:
    return LoRARequest(str(number), number, f"/{number}")


def item(name: str) -> MediaInput:
    return MediaInput("image", {}, name, 3, 0)


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def adapters(tower: Tower) -> StepAdapters:
    """Rows 1 and 2 have adapters of towers; row 0 has none."""
    made = StepAdapters(tower, CONTENTS.__getitem__, torch.device("cpu"))  # type: ignore[arg-type]
    made.place({0: lora(1), 1: lora(2)})
    for row in (0, 1, 2):
        request = SimpleNamespace(lora_request=lora(row) if row else None)
        made.add(row, SimpleNamespace(request=request))  # type: ignore[arg-type]
    return made


def test_one_image_of_three_requests(tower: Tower, adapters: StepAdapters) -> None:
    vectors = MediaVectors(tower.embed, 100)
    due = [(2, item("x")), (0, item("x")), (1, item("x")), (2, item("y")), (2, item("x"))]
    found = adapters.embed(due, vectors)
    assert [float(own[0, 0]) for own in found] == [2, 0, 1, 2, 2]
    assert tower.ran == [(["x", "y"], 1), (["x"], None), (["x"], 0)]
    assert tower.slot is None
    again = adapters.embed([(1, item("x")), (2, item("y")), (0, item("x"))], vectors)
    assert [float(own[0, 0]) for own in again] == [1, 2, 0]
    assert (len(tower.ran), vectors.num_embedded) == (3, 4)


def test_an_adapter_of_text_alone_shares_the_bases_vectors(
    tower: Tower, adapters: StepAdapters
) -> None:
    vectors = MediaVectors(tower.embed, 100)
    adapters.embed([(0, item("x"))], vectors)
    adapters.place({1: lora(3)})
    adapters.add(5, SimpleNamespace(request=SimpleNamespace(lora_request=lora(3))))  # type: ignore[arg-type]
    [own] = adapters.embed([(5, item("x"))], vectors)
    assert float(own[0, 0]) == 0
    assert tower.ran == [(["x"], None)]


def test_nothing_is_chosen_behind_a_tower_that_fails(tower: Tower, adapters: StepAdapters) -> None:
    with pytest.raises(ValueError, match="bad"):
        adapters.embed([(1, item("bad"))], MediaVectors(tower.embed, 100))
    assert tower.slot is None


def test_vectors_of_other_engines_and_of_slices_are_without_adapters(
    tower: Tower, adapters: StepAdapters
) -> None:
    class Transfer:
        saved: list[str] = []  # noqa: RUF012 - of one test

        def load(self, one: MediaInput) -> Tensor:
            return torch.full((3, 2), 9.0)

        def save(self, one: MediaInput, vectors: Tensor) -> None:
            self.saved.append(one.content_hash)

    transfer: Any = Transfer()
    vectors = MediaVectors(tower.embed, 100, transfer=transfer)
    assert float(adapters.embed([(0, item("x"))], vectors)[0][0, 0]) == 9
    assert float(adapters.embed([(1, item("x"))], vectors)[0][0, 0]) == 1
    assert transfer.saved == ["x"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_loras", 4), ("max_lora_rank", 8), ("max_cpu_loras", 2), ("fully_sharded_loras", True),
     ("lora_dtype", "float32")],
)  # fmt: skip
def test_settings_of_adapters_need_adapters(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"lora.{name} = {value!r}: must be set together"
    ) as caught:
        LoRAConfig(**{name: value}).check_used()
    assert caught.value.field == f"lora.{name}"
    LoRAConfig(enable_lora=True, **{name: value}).check_used()
    LoRAConfig().check_used()


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="set together with enable_lora"):
        LoRAConfig(enable_tower_connector_lora=True)
    towers = LoRAConfig(enable_lora=True, enable_tower_connector_lora=True)
    connector = {"ec_connector": "x", "ec_role": "ec_consumer"}
    with pytest.raises(ConfigError, match="ec_transfer_config") as raised:
        EngineConfig(lora=towers, multimodal=MultiModalConfig(ec_transfer_config=connector))
    assert raised.value.field == "lora.enable_tower_connector_lora"
