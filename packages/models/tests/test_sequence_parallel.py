"""Ranks that have a part of the tokens between layers: the same bits as with all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.loading.update import LoadRecord
from headrace_models.resolve import resolve
from headrace_models.sequence_parallel import TokenShares, check_shareable, share_tokens
from headrace_testing.model.decoders import PagedDriver, build_context, run_ranks

STEPS: list[dict[str, list[int]]] = [
    {"a": list(range(3, 14)), "b": [5, 9]},
    {"a": [7], "b": [8, 1, 30, 2]},
    {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8]},
]
"""13, 5 and 8 tokens: two ranks share the first and the last."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=48, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen2")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_passes_give_the_same_bits(folder: Path, ranks: int) -> None:
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())

    def steps_of(group: Communicator, least: int) -> tuple[list[Tensor], int]:
        model: Any = load_model(info, replace(build_context(info), communicator=group))
        norms: list[int] = []
        if least:
            share_tokens(model, group, least)
            second = model.layers[1].input_norm.norm
            add = second.add
            second.add = lambda x, residual: (norms.append(len(x)), add(x, residual))[1]
        driver = PagedDriver(model)
        outs = [driver.step(step, rows=[0, 4]) for step in STEPS]
        return outs, max(norms, default=0)

    whole = run_ranks(ranks, lambda group: steps_of(group, 0))
    shared = run_ranks(ranks, lambda group: steps_of(group, 7))
    for (expected, _), (found, rows) in zip(whole, shared, strict=True):
        assert all(map(torch.equal, found, expected))
        assert rows == max(-(-13 // ranks), 5), "large passes are shared, small ones not"


def test_layers_that_get_new_weights_share_tokens_as_before(folder: Path) -> None:
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    stored = load_file(folder / "model.safetensors")

    def steps_of(group: Communicator, updates: bool) -> list[Tensor]:
        record = LoadRecord()
        context = replace(build_context(info), communicator=group)
        model: Any = load_model(info, context, record=record)
        share_tokens(model, group, 7)
        if updates:
            update = record.update()
            update.take(stored.items())
            update.check_whole()
            update.seal()
            update.apply()
        driver = PagedDriver(model)
        return [driver.step(step, rows=[0, 4]) for step in STEPS]

    expected, _ = run_ranks(2, lambda group: steps_of(group, False))
    found, _ = run_ranks(2, lambda group: steps_of(group, True))
    assert all(map(torch.equal, found, expected))


def test_rows_are_divided_and_come_back() -> None:
    def work(group: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        shares = TokenShares(group, 4)
        x = torch.arange(14.0).view(7, 2)
        with shares.sharing(7):
            own = shares.own(x)
            return own, shares.gathered(own), shares.gathered(shares.summed(x))

    x = torch.arange(14.0).view(7, 2)
    for own, gathered, summed in run_ranks(3, work):
        assert own.shape == (3, 2)
        assert torch.equal(gathered, x)
        assert torch.equal(summed, 3 * x)


def test_models_of_other_blocks_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"enable_sp = True: .*SimpleNamespace has a pass of its"
    ) as error:
        check_shareable(SimpleNamespace())
    assert error.value.field == "parallel.enable_sp"
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    model: Any = load_model(info, build_context(info))
    with pytest.raises(ConfigError, match="layer 0 is whole on every rank"):
        check_shareable(model)
    model.layers[1].mlp = SimpleNamespace()
    model.layers[0].attention.out.reduce = model.layers[0].mlp.down.reduce = True
    with pytest.raises(ConfigError, match="layer 1 has a SimpleNamespace"):
        check_shareable(model)
