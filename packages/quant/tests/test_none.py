from __future__ import annotations

import pytest
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec
from headrace_testing.model.quant_methods import QuantConformance


class TestNone(QuantConformance):
    name = "none"
    config = None

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        # The mean is taken of what a 16-bit checkpoint would hold.
        kept = weight.bfloat16().float()
        return {"weight": kept}, kept

    def test_quantized_checkpoint_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"'none' cannot read .* 'awq'"):
            self.method(config={"quant_method": "awq"})

    def test_is_plain(self) -> None:
        assert self.method().for_layer(self.spec()).is_plain
