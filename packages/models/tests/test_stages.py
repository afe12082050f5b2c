"""Cutting a decoder into stages: who gets which layers, and how the stream goes on."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, ModelError, WeightsError
from headrace_core.model import LaunchesPasses, RunsParts
from headrace_core.parallel import Communicator, SingleProcess
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import Built, load_model
from headrace_models.loading.update import LoadRecord, blank_model
from headrace_models.resolve import resolve
from headrace_models.stages.division import layers_by_stage, partition_of
from headrace_models.stages.stage import Link, Stage, Stream
from headrace_testing.model.decoders import PagedDriver, build_context, run_ranks


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    first=st.integers(0, 60),
    count=st.integers(1, 4),
)
def test_no_other_division_needs_less_memory(costs: list[int], first: int, count: int) -> None:
    count = min(count, len(costs))

    def most(numbers: tuple[int, ...]) -> int:
        ends = list(itertools.accumulate(numbers))
        sums = [sum(costs[end - n : end]) for n, end in zip(numbers, ends)]
        return max(sums[0] + first, *sums)

    numbers = layers_by_stage(costs, first, count)
    assert len(numbers) == count
    assert sum(numbers) == len(costs)
    assert min(numbers) >= 1
    every = itertools.product(range(1, len(costs) + 1), repeat=count)
    assert most(numbers) == min(most(n) for n in every if sum(n) == len(costs))


def test_equal_layers_are_divided_evenly() -> None:
    assert layers_by_stage([5] * 12, 0, 4) == (3, 3, 3, 3)
    assert layers_by_stage([5] * 12, 10, 2) == (5, 7)
    assert sorted(layers_by_stage([5] * 7, 0, 3)) == [2, 2, 3]


def test_a_partition_is_read_strictly() -> None:
    assert partition_of("3,5", 2) == (3, 5)
    for text in ("3", "3,x", "", "8,0", "3,5,1", "-1,9"):
        with pytest.raises(ConfigError, match=r"HEADRACE_PP_LAYER_PARTITION = .*must be 2 numbers"):
            partition_of(text, 2)


STREAMS = [
    Stream(torch.randn(3, 5)),
    Stream(torch.randn(2, 4).bfloat16(), torch.randn(2, 4)),
    Stream(torch.empty(0, 4), torch.empty(0, 4)),
    Stream(torch.randn(1, 4), torch.randn(1, 4), torch.randn(6, 4)),
]


def test_a_stream_comes_as_it_was_sent() -> None:
    def work(pair: Communicator) -> list[Any]:
        link = Link(pair)
        if pair.rank == 0:
            for stream in [*STREAMS, STREAMS[0]]:
                link.send(stream, 7)
            link.send(STREAMS[0], 6)
            return []
        found: list[Any] = [link.receive(7) for _ in STREAMS]
        later = link.expect(lambda: link.receive(7), lambda stream: lambda: stream.x + 1)
        found.append(later.result(60)())
        with pytest.raises(ModelError, match="has passed 6 layers, and needs one after 7"):
            link.receive(7)
        receiver = link._receiver
        assert receiver is not None
        link.close()
        assert not receiver.is_alive()
        pair.broadcast(torch.empty(3, 5), 0)  # so that the sender comes to its end
        return found

    _, found = run_ranks(2, work)
    for came, stream in zip(found, STREAMS):
        for one, sent in zip(came, stream, strict=True):
            assert (one is None) == (sent is None)
            assert one is None or (one.dtype == sent.dtype and torch.equal(one, sent))
    assert torch.equal(found[-1], STREAMS[0].x + 1)


def test_a_stream_like_the_last_one_needs_no_header() -> None:
    first, like = STREAMS[1], Stream(torch.randn(5, 4).bfloat16(), torch.randn(5, 4))

    def work(pair: Communicator) -> Stream | None:
        link = Link(pair)
        with pytest.raises(ModelError, match=r"not like the last|no stream has come"):
            link.send_alike(like) if pair.rank == 0 else link.receive_alike(5)
        if pair.rank:
            link.receive(1)
            return link.receive_alike(5)
        link.send(first, 1)
        for other in (Stream(like.x), Stream(like.x.float(), like.residual), STREAMS[3]):
            with pytest.raises(ModelError, match="not like the last"):
                link.send_alike(other)
        link.send_alike(like)
        return None

    _, found = run_ranks(2, work)
    assert found is not None
    assert torch.equal(found.x, like.x)
    assert torch.equal(found.residual, like.residual)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def stage(index: int, count: int, partition: tuple[int, ...] = ()) -> Stage:
    link = Link(SingleProcess())
    ways = {
        "before": link if index else None,
        "after": link if index < count - 1 else None,
        "result": link if index in (0, count - 1) else None,
    }
    return Stage(index, count, partition, **ways)


def built(folder: Path, of: Stage) -> Built:
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    return Built.of(info, replace(build_context(info), stage=of))


def test_each_stage_waits_for_its_own_tensors(folder: Path) -> None:
    parts = [built(folder, stage(index, 3, (1, 1, 1))) for index in range(3)]
    names = [{wanted.source for wanted in part.weights.wanted()} for part in parts]
    stored = set(load_file(folder / "model.safetensors"))
    assert set.union(*names) == stored
    assert sum(map(len, names)) == len(stored)
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names[0]
    assert [isinstance(part.model, LaunchesPasses) for part in parts] == [True, False, False]
    slot = "layers.2.mlp.down.weight"
    assert [part.is_slot_elsewhere(slot) for part in parts] == [True, True, False]
    for part, own in zip(parts, names):
        assert all(part.passes_over(name) for name in stored - own)
        assert not any(
            part.passes_over(name) for name in [*own, "model.layers.3.mlp.up_proj.weight"]
        )


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (stage(0, 4), "parallel.pipeline_parallel_size = 4: must be at most 3"),
        (stage(0, 2, (1, 1)), "1,1: these are 2 layers, and the model has 3"),
    ],
)
def test_stages_without_layers_are_refused(folder: Path, of: Stage, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(folder, of)


def test_a_tensor_of_no_stage_is_refused_by_each(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    more = {**tensors, "model.layers.7.mlp.up_proj.weight": torch.zeros(48, 32)}
    save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    info = resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())
    for index in range(2):
        context = replace(build_context(info), stage=stage(index, 2))
        with pytest.raises(WeightsError, match=r"layers\.7.*belongs to no layer"):
            load_model(info, context)


def test_a_tied_head_that_is_stored_is_passed_over(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    more = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    info = resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())
    for index in range(2):
        load_model(info, replace(build_context(info), stage=stage(index, 2)))


def test_an_update_of_a_stage_passes_over_what_is_anothers(folder: Path) -> None:
    """But checks its place, and counts it: a stage that nothing is for has the update, too."""
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    stored = load_file(folder / "model.safetensors")
    own, theirs = (f"model.layers.{index}.mlp.down_proj.weight" for index in (0, 2))
    record = LoadRecord()
    load_model(info, replace(build_context(info), stage=stage(0, 2, (1, 2))), record=record)
    assert record.max_tensors > 8 * len(stored)
    assert record.max_bytes > 8 * sum(one.numel() for one in stored.values())
    update = record.update()
    for name, tensor, message in (
        (theirs, stored[theirs][:3], r"has shape \[3, 48\], the model needs \[32, 48\]"),
        (theirs, stored[theirs].int(), "has dtype int32"),
        ("model.layers.3.mlp.down_proj.weight", stored[own], "belongs to no layer"),
        (own, stored[own] * torch.nan, "NaN"),
    ):
        with pytest.raises(WeightsError, match=message):
            update.take([(name, tensor)])
    with pytest.raises(WeightsError, match="comes twice"):
        update.take([(theirs, stored[theirs]), (theirs, stored[theirs])])
    assert update.num_tensors == 0
    update.take([(theirs, stored[theirs] * torch.nan)])  # its own stage looks at the numbers
    before = update.checkpoint()
    update.take([(own, 2 * stored[own])])
    assert update.num_tensors == 2
    before()
    assert update.num_tensors == 1
    update.check_whole()
    update.seal()
    update.apply()()


def test_an_update_of_a_stage_without_weights_needs_its_own(folder: Path) -> None:
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    stored = load_file(folder / "model.safetensors")
    record = blank_model(info, replace(build_context(info), stage=stage(1, 2, (1, 2))))
    update = record.update()
    own = {
        name: one for name, one in stored.items() if ".layers.1." in name or ".layers.2." in name
    }
    update.take(item for item in stored.items() if item[0] not in own)
    with pytest.raises(WeightsError, match=r"missing: .*layers\.1"):
        update.check_whole()
    update.take(own.items())
    assert update.num_tensors == len(stored)
    for _ in range(2):  # what is taken out again may be put in again
        update.check_whole()
        update.seal()
        update.apply()()


WANTED = (2, 0, 3, 1, 2)
"""Streams of three layers, in no order and one of them twice."""


def test_streams_before_layers_of_other_stages(folder: Path) -> None:
    """Those of the first stage stay there; the second one's come with the result."""
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())

    def shown(part: Any) -> list[Tensor]:
        batch = PagedDriver(part).batch({"a": [5, 6, 7], "b": [8]})
        batch = replace(batch, logits_rows=None)
        with torch.inference_mode():
            given = part.forward_streams(batch, WANTED)
        if isinstance(part, RunsParts) and part.ends_pass:
            return []
        hidden, streams = given
        return [hidden, *streams]

    def work(pair: Communicator) -> list[Tensor]:
        there, back = Link(pair, 0), Link(pair, 1)
        ways: dict[str, Any] = {"before": there} if pair.rank else {"after": there}
        of = Stage(pair.rank, 2, (1, 2), result=back, **ways)
        return shown(load_model(info, replace(build_context(info), stage=of)))

    expected = shown(load_model(info, build_context(info)))
    found, _ = run_ranks(2, work)
    assert len(found) == 1 + len(WANTED)
    assert all(map(torch.equal, found, expected))
