"""Heads and tables in integers over ranks have the bits of whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save_model
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.parallel import Communicator, SingleProcess
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import build_context, run_ranks

VOCAB_SIZE = 131
"""Which four ranks do not divide."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "apart"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    kind, sizes = FAMILIES["llama"]
    own = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": request.param, "hidden_size": 256,
           "intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 4}  # fmt: skip
    save_model("llama", path, {"llama": (kind, {**sizes, **own})})
    return path


def loaded(folder: Path, method: str, group: Communicator) -> Any:
    settings = ModelConfig(model=str(folder), quantization=method, max_model_len=64)
    info = resolve(settings, LoadConfig(), CpuPlatform())
    ops = bind_ops(KernelNeed(device="cpu", dtype=info.dtype))
    if not ops.row_invariant:
        pytest.skip("the native CPU kernels are not built")
    quant = quant_method(info, method, ops, device="cpu")
    return load_model(info, build_context(info, ops=ops, quant=quant, communicator=group))


def ends(model: Any) -> tuple[Tensor, Tensor]:
    """Vectors of all tokens, and logits of hidden states."""
    hidden = torch.linspace(-1, 1, 5 * 256).view(5, 256).to(getattr(torch, model.context.dtype))
    with torch.inference_mode():
        return model.token_vectors(torch.arange(VOCAB_SIZE)), model.compute_logits(hidden)


@pytest.mark.parametrize("method", ["int8", "int4_g32", "q4_k", "fp8"])
def test_four_ranks_have_the_bits_of_one(method: str, folder: Path) -> None:
    whole = loaded(folder, method, SingleProcess())
    vectors, logits = ends(whole)
    seen = []

    def work(group: Communicator) -> tuple[Tensor, Tensor]:
        model = loaded(folder, method, group)
        seen.append(model.head_shard.size)
        return ends(model)

    for found in run_ranks(4, work):
        assert torch.equal(found[0], vectors)
        assert torch.equal(found[1], logits)
    assert sum(seen) == VOCAB_SIZE
