from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.linear import QuantNeed
from headrace_core.model import ModelInfo
from headrace_core.ops import QUANT_ACTIVATIONS, Rounding
from headrace_models.activation_forms import ActivationForms, forms_for
from headrace_models.quantization import quant_method, quant_method_name, quantization_config


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


def packed_for(need: QuantNeed, chosen: str) -> dict[str, str]:
    """Form that a format names -> what a weight is packed for, and what one is rounded for."""
    found = {}
    for stored in QUANT_ACTIVATIONS:
        op = Packing()
        forms = ActivationForms(op, forms_for(need, chosen))  # type: ignore[arg-type]
        forms.pack(None, "float32", activations=stored)  # type: ignore[arg-type]
        forms.round(None, "float32", Rounding(8), activations=stored)  # type: ignore[arg-type]
        found[stored], rounded = op.forms
        assert found[stored] == rounded
    return found


CPU, XPU = QuantNeed("bfloat16", "cpu"), QuantNeed("bfloat16", "xpu")
ADA, HOPPER = (QuantNeed("bfloat16", "cuda", capability) for capability in ((8, 9), (9, 0)))
AMPERE, ROCM = QuantNeed("bfloat16", "cuda", (8, 6)), QuantNeed("bfloat16", "cuda")


@pytest.mark.parametrize("need", [CPU, XPU, ADA, AMPERE], ids=str)
@pytest.mark.parametrize("form", ["float", "int8"])
def test_the_users_form_of_activations_wins(form: str, need: QuantNeed) -> None:
    assert packed_for(need, form) == dict.fromkeys(QUANT_ACTIVATIONS, form)


@pytest.mark.parametrize("need", [CPU, XPU, ADA, HOPPER, AMPERE, ROCM], ids=str)
def test_fp8_that_a_format_names_is_for_gpus_that_multiply_it(need: QuantNeed) -> None:
    own = "fp8" if need in (ADA, HOPPER) else "float"
    assert packed_for(need, "auto") == {"int8": "int8", "float": "float", "fp8": own}


@pytest.mark.parametrize("need", [CPU, ADA, HOPPER], ids=str)
def test_fp8_that_the_user_chose(need: QuantNeed) -> None:
    assert packed_for(need, "fp8") == dict.fromkeys(QUANT_ACTIVATIONS, "fp8")


@pytest.mark.parametrize(
    ("need", "named"), [(XPU, "'xpu'"), (AMPERE, "'cuda' of capability 8.6"), (ROCM, "'cuda'")]
)
def test_fp8_on_a_device_without_it_is_refused_by_name(need: QuantNeed, named: str) -> None:
    plain = info(quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError) as caught:
        quant_method(
            plain,
            None,
            None,  # type: ignore[arg-type]
            device=need.device,
            device_capability=need.device_capability,
            activations="fp8",
        )
    assert caught.value.field == "model.quantization_activations"
    for part in ("model.quantization_activations = 'fp8'", named, "8.9", "'float' or 'int8'"):
        assert part in str(caught.value)
