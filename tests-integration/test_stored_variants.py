"""Every way of storing that a format has is transformers' model with what it means: batched, in chunks, after
a preemption and over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantized_checkpoints import check_whole
from stored_variants import VARIANTS

from headrace_core.errors import HeadraceError
from headrace_testing.model.decoders import build_context, run_ranks


@pytest.mark.keep(8, every_value=False)
@pytest.mark.parametrize("name", VARIANTS)
def test_whole_model(name: str, tmp_path: Path) -> None:
    suite = VARIANTS[name]()
    made = check_whole(suite, tmp_path)
    if suite.tensor_parallel > 1:
        return
    info = suite.resolve(made.path, max_model_len=64)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(HeadraceError, match=suite.refusal) as caught:
        run_ranks(2, lambda group: suite.load(info, build_context(info, communicator=group)))
    assert "_proj" in str(caught.value)
