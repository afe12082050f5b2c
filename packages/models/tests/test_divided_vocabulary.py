"""A vocabulary over ranks: each has its share of tables and heads, and all have the bits of a whole one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.linear import LinearSpec, TensorSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.parallel import Communicator, SingleProcess
from headrace_core.platform import CpuPlatform
from headrace_models.layers.decoder import Decoder
from headrace_models.layers.vocabulary import VocabShard, fitting_shard, vocab_shard
from headrace_models.loading.absent_group import AbsentGroup
from headrace_models.loading.loader import load_model
from headrace_models.loading.sharded_state import save_sharded_state
from headrace_models.resolve import resolve
from headrace_models.weight_bytes import kept_bytes, leaf_bytes
from headrace_testing.model.decoders import PlainQuant, build_context, run_ranks

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = [0, 1, 5, 67, 68, 130, 64, 2, 5]


def shards(vocab_size: int, ranks: int) -> list[VocabShard | None]:
    return [vocab_shard(vocab_size, AbsentGroup(rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("vocab_size", "sizes"),
    [
        (128, [64, 64]),
        (151936, [75968, 75968]),
        (151936, [37984] * 4),
        (131, [68, 63]),
        (32001, [16128, 15873]),
        (50257, [12672, 12672, 12672, 12241]),
        (7, [2, 2, 2, 1]),
    ],
)
def test_each_token_is_on_one_rank(vocab_size: int, sizes: list[int]) -> None:
    found = [one for one in shards(vocab_size, len(sizes)) if one is not None]
    assert [one.size for one in found] == sizes
    assert [one.start for one in found] == [sum(sizes[:rank]) for rank in range(len(sizes))]


@pytest.mark.parametrize(("vocab_size", "ranks"), [(128, 1), (3, 4), (5, 4)])
def test_whole_where_it_cannot_be_divided(vocab_size: int, ranks: int) -> None:
    assert shards(vocab_size, ranks) == [None] * ranks


class Blocks(PlainQuant):
    """Weights with a scale for each block of rows."""

    is_plain = False

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        scales = -(-spec.out_features // self.rows)
        return {"weight": TensorSpec((spec.out_features, spec.in_features), "int8"),
                "scale": TensorSpec((scales, 1), "float32")}  # fmt: skip


@pytest.mark.parametrize(
    ("vocab_size", "rows", "ranks", "width"),
    [
        (151936, 128, 2, 76032),  # half of it is no multiple of a block
        (32000, 128, 2, 16000),
        (192, 128, 2, None),  # the last block is not a whole one
        (1024, 1, 2, 512),
        (200, 96, 2, None),
    ],
)
def test_blocks_of_rows_stay_together(
    vocab_size: int, rows: int, ranks: int, width: int | None
) -> None:
    spec, method = LinearSpec("lm_head", 64, (vocab_size,), "float32"), Blocks(rows)
    found = [
        fitting_shard(spec, AbsentGroup(rank, ranks), lambda own: method) for rank in range(ranks)
    ]
    assert [one and one.width for one in found] == [width] * ranks


def saved(folder: Path, kind: str, vocab_size: int, *, tied: bool, **more: Any) -> Path:
    config = transformers.AutoConfig.for_model(
        kind, **{**SIZES, "vocab_size": vocab_size, "tie_word_embeddings": tied, **more}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, group: Communicator, dtype: str) -> Any:
    settings = ModelConfig(model=str(folder), dtype=dtype, max_model_len=64)
    info = resolve(settings, LoadConfig(), CpuPlatform())
    ops = bind_ops(KernelNeed(device="cpu", dtype=dtype))
    if not ops.row_invariant:
        pytest.skip("the native CPU kernels are not built")
    return load_model(info, build_context(info, ops=ops, communicator=group))


def at_both_ends(model: Any) -> tuple[Tensor, Tensor]:
    """Vectors of tokens, and logits of hidden states."""
    hidden = torch.linspace(-1, 1, 5 * 64).view(5, 64).to(getattr(torch, model.context.dtype))
    with torch.inference_mode():
        return model.token_vectors(torch.tensor(IDS)), model.compute_logits(hidden)


SCALED = {"head_dim": 16, "sliding_window": 16}
KINDS: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama", True, {}),
    ("llama", False, {}),
    ("gemma2", True, SCALED),  # vectors are scaled, logits capped
    ("gemma2", False, SCALED),
    ("phi", False, {}),  # a head with a bias
]


@pytest.mark.parametrize(("kind", "tied", "more"), KINDS)
@pytest.mark.parametrize(("vocab_size", "ranks", "dtype"), [
    (131, 2, "float32"), (256, 4, "bfloat16"), (131, 4, "float32"),
])  # fmt: skip
def test_ranks_have_the_bits_of_one(
    kind: str, tied: bool, more: dict[str, Any], vocab_size: int, ranks: int, dtype: str, tmp_path: Path
) -> None:  # fmt: skip
    folder = saved(tmp_path, kind, vocab_size, tied=tied, **more)
    vectors, logits = at_both_ends(loaded(folder, SingleProcess(), dtype))
    assert logits.shape == (5, vocab_size)
    for found in run_ranks(ranks, lambda group: at_both_ends(loaded(folder, group, dtype))):
        assert torch.equal(found[0], vectors)
        assert torch.equal(found[1], logits)


def test_a_rank_keeps_its_share(tmp_path: Path) -> None:
    """And knows of each token whether it has it."""
    folder = saved(tmp_path, "llama", 256, tied=False)
    whole = loaded(folder, SingleProcess(), "float32")
    table = leaf_bytes(whole.embed, "float32")
    assert table == leaf_bytes(whole.head, "float32") == 4 * 256 * 64
    for rank in range(4):
        model: Decoder = loaded(folder, AbsentGroup(rank, 4), "float32")
        assert leaf_bytes(model.embed, "float32") == table // 4
        assert leaf_bytes(model.head, "float32") == table // 4
        assert model.embed.own_rows is not None
        assert model.embed.own_rows.num_bytes == 256 * (8 + 4)
        assert list(model.vocabulary_passes) == ["token_vectors", "compute_logits"]
    assert list(whole.vocabulary_passes) == []
    layers = sum(kept_bytes(layer, "float32") for layer in whole.layers)
    assert kept_bytes(model, "float32") < kept_bytes(whole, "float32") - layers - table


def test_states_that_were_saved_with_whole_tables(tmp_path: Path) -> None:
    """As they are cut now, so they are read."""
    folder = saved(tmp_path / "checkpoint", "llama", 131, tied=False)
    info = resolve(ModelConfig(model=str(folder), max_model_len=64), LoadConfig(), CpuPlatform())
    save_sharded_state(info, build_context(info), tmp_path / "state", world_size=2)
    tables = load_file(folder / "model.safetensors")
    for file in (tmp_path / "state").glob("*.safetensors"):
        tensors = load_file(file)
        assert tensors["embed.weight"].shape[0] < 131
        tensors["embed.weight"] = tables["model.embed_tokens.weight"]
        tensors["head.weight"] = tables["lm_head.weight"]
        save_file(tensors, file, metadata={"world_size": "2"})

    def opened(path: Path, group: Communicator) -> tuple[Tensor, Tensor]:
        info = resolve(ModelConfig(model=str(path), max_model_len=64), LoadConfig(), CpuPlatform())
        return at_both_ends(load_model(info, build_context(info, communicator=group)))

    now = run_ranks(2, lambda group: opened(folder, group))
    then = run_ranks(2, lambda group: opened(tmp_path / "state", group))
    for found, expected in zip(then, now, strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_the_shard_says_where_it_is() -> None:
    shard = VocabShard(131, 68, 68)
    assert (shard.size, shard.part.start, shard.part.whole) == (63, 68, 131)
    assert dataclasses.replace(shard, start=0).size == 68
