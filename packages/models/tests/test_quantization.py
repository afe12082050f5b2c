from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.model import ModelInfo
from headrace_core.ops import Rounding
from headrace_models.fixed_activations import FixedActivations
from headrace_models.quantization import quant_method_name, quantization_config


def info(**config: Any) -> ModelInfo:
    return ModelInfo("some/model", Path(), "A", config, {}, "float32", 8, 9, ())


def test_plain_checkpoint() -> None:
    assert quantization_config(info()) is None
    assert quant_method_name(info(), None) == "none"
    assert quant_method_name(info(), "int8") == "int8"


def test_the_checkpoint_says() -> None:
    quantized = info(quantization_config={"quant_method": "awq", "bits": 4})
    assert quant_method_name(quantized, None) == "awq"
    assert quant_method_name(quantized, "awq") == "awq"


def test_two_answers_are_an_error_naming_both() -> None:
    quantized = info(quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match=r"'int8'.*'some/model'.*'awq'"):
        quant_method_name(quantized, "int8")


@pytest.mark.parametrize("block", [3, {"bits": 4}, {"quant_method": 4}, ["awq"]])
def test_unusable_block(block: object) -> None:
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        quant_method_name(info(quantization_config=block), None)


class Packing:
    """A ``quant_linear`` that notes in what form activations are to enter."""

    def __init__(self) -> None:
        self.forms: list[str] = []

    def pack(self, weight: Any, dtype: str, *, activations: str) -> None:
        self.forms.append(activations)

    def round(self, weight: Any, dtype: str, rounding: Any, *, activations: str) -> None:
        self.forms.append(activations)


@pytest.mark.parametrize("form", ["float", "int8"])
def test_the_users_form_of_activations_wins(form: str) -> None:
    op = Packing()
    fixed = FixedActivations(op, form)  # type: ignore[arg-type]
    for stored in ("float", "int8"):
        fixed.pack(None, "float32", activations=stored)  # type: ignore[arg-type]
        fixed.round(None, "float32", Rounding(8), activations=stored)  # type: ignore[arg-type]
    assert op.forms == [form] * 4
