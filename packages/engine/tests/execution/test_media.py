"""Media in a worker: an encoder-decoder model, and one that takes embeddings for placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.arrays import PackedArray
from headrace_core.batch import ForwardBatch
from headrace_core.kv import CrossAttentionSpec, KVCacheSpec
from headrace_core.model import INPUT_EMBEDS
from headrace_core.multimodal import MediaInput
from headrace_core.pooling import PoolingParams
from headrace_core.sampling.params import SamplingParams
from headrace_engine.execution.measuring.largest import LargestItem
from headrace_engine.worker.settings import MediaSettings
from headrace_reference.attention import attend

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]


def item(states: int, seed: int, offset: int = -1, hidden: int = 16) -> MediaInput:
    """Random vectors: the encoder of these tests adds nothing to them."""
    values = torch.randn(states, hidden, generator=torch.Generator().manual_seed(seed))
    data = values.numpy().tobytes()
    array = PackedArray("float32", (states, hidden), data)
    return MediaInput("audio", {"vectors": array}, f"{seed:x}", states, offset)


def vectors(media: MediaInput) -> Tensor:
    array = media.inputs["vectors"]
    return torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(array.shape)


@pytest.fixture
def hearing(tiny: Any) -> Any:
    """An encoder-decoder: the last layer's keys and values come from encoder states."""

    class CrossBackend(tiny.PagedBackend):  # type: ignore[misc, name-defined]
        def forward(
            self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any
        ) -> Any:
            if metadata is None or layer.attention_type == "decoder":
                return super().forward(layer, query, key, value, kv_cache, metadata)
            batch, group = metadata
            where, caches = batch.groups[group], self.views(kv_cache)
            if key is not None:
                self.ops.cache_write(key, value, *caches, where.slot_mapping)
            return self.ops.paged_attention(
                query, *caches, where.block_table, batch.cu_seqlens_q, where.seq_lens,
                max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=where.max_seqlen_k,
                scale=layer.scale, causal=False,
            )  # fmt: skip

    class CrossLayer(tiny.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.spec = replace(self.spec, attention_type="encoder_decoder")
            full = self.kv_spec
            self.kv_spec: KVCacheSpec = CrossAttentionSpec(
                full.block_size, full.num_kv_heads, full.head_dim, full.dtype, max_encoder_tokens=40
            )

        def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
            metadata = (batch, self.group) if batch.groups else None
            key = value = None
            if batch.encoder_states is not None:
                _, key, value = self.project(batch.encoder_states)
            query = self.project(x)[0]
            out = self.backend.forward(self.spec, query, key, value, self.cache, metadata)
            return x + out.reshape(x.shape)

    class HearingLM(tiny.LM):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__((None, None), CrossBackend)
            cross = CrossLayer(
                "layers.cross", self.layers[0].backend, None, torch.Generator().manual_seed(9)
            )
            self.layers.append(cross)
            self.encoded: list[list[int]] = []

        def encode(self, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
            self.encoded.append([len(one["vectors"]) for one in inputs])
            return torch.cat([one["vectors"] for one in inputs])

        @torch.no_grad()
        def heard_greedy(self, prompt: Sequence[int], media: MediaInput, count: int) -> list[int]:
            """Without cache, pages or batch."""
            tokens = list(prompt)
            for _ in range(count):
                x = self.embed[torch.tensor(tokens)] + self.place[torch.arange(len(tokens))]
                for layer in self.layers[:-1]:
                    x = layer.dense(x)
                cross = self.layers[-1]
                states = vectors(media)
                _, k, v = cross.project(states)
                rows = [attend(q[None], k, v, scale=cross.spec.scale) for q in cross.project(x)[0]]
                x = x + torch.cat(rows).reshape(x.shape)
                tokens.append(int((x @ self.head)[-1].argmax()))
            return tokens[len(prompt) :]

    return HearingLM


def test_requests_hear_what_is_theirs_at_any_length(tiny: Any, hearing: Any) -> None:
    h = tiny.Harness(hearing())
    media = {"a": item(7, 1), "b": item(33, 2), "c": item(1, 3)}
    prompts = {"a": PROMPT, "b": [2, 7], "c": PROMPT}
    new = {n: h.new(n, prompts[n], GREEDY, media=[media[n]]) for n in "abc"}
    found: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def step(scheduled: dict[str, int], *names: str) -> None:
        result = h.step(scheduled, [new[n] for n in names]).requests
        for name, one in result.items():
            assert one.error is None
            found[name] += one.token_ids

    step({"a": 5, "b": 2}, "a", "b")
    step({"b": 1, "a": 1})
    step({"a": 1, "c": 5, "b": 1}, "c")  # one encodes while others go on
    for _ in range(4):
        step({"c": 1, "a": 1, "b": 1})
    assert h.model.encoded == [[7, 33], [1]], "media are encoded once, in a request's first step"
    for name, tokens in found.items():
        assert tokens == h.model.heard_greedy(prompts[name], media[name], len(tokens))
    assert found["a"] != found["c"][: len(found["a"])]


def test_a_preempted_request_encodes_again(tiny: Any, hearing: Any) -> None:
    h = tiny.Harness(hearing())
    heard = item(9, 4)
    tokens = h.step({"a": 5}, [h.new("a", PROMPT, GREEDY, media=[heard])]).requests["a"].token_ids
    tokens += h.step({"a": 1}).requests["a"].token_ids
    again = h.new("a", PROMPT, GREEDY, output=tokens, media=[heard])
    tokens += h.step({"a": 7}, [again], ["a"]).requests["a"].token_ids
    assert h.model.encoded == [[9], [9]]
    assert tokens == h.model.heard_greedy(PROMPT, heard, 3)


def test_missing_blocks_for_encoder_states_are_one_requests_error(tiny: Any, hearing: Any) -> None:
    h = tiny.Harness(hearing())
    bad, good = (h.new(n, PROMPT, GREEDY, media=[item(9, 5)]) for n in "ab")
    bad.block_ids[1].pop()
    results = h.step({"a": 5, "b": 5}, [bad, good]).requests
    assert results["a"].error is not None
    assert "do not fit" in results["a"].error
    assert results["b"].token_ids == h.model.heard_greedy(PROMPT, item(9, 5), 1)


def test_an_encoder_that_miscounts_is_named(tiny: Any, hearing: Any) -> None:
    class Short(hearing):  # type: ignore[misc]
        def encode(self, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
            return torch.zeros(3, 16)

    h = tiny.Harness(Short())
    with pytest.raises(
        Exception, match=r"Short.encode returned \[3, 16\], not 9 states of 1 items"
    ):
        h.step({"a": 5}, [h.new("a", PROMPT, GREEDY, media=[item(9, 5)])])


def test_memory_is_measured_with_the_largest_item(tiny: Any, hearing: Any) -> None:
    h = tiny.Harness(hearing(), media=MediaSettings(largest=lambda: [LargestItem(item(40, 6))]))
    h.model.encoded.clear()
    h.worker.profile()
    h.worker.warm_up()
    assert h.model.encoded == [[40]]


def test_memory_is_reckoned_from_a_smaller_item(tiny: Any, hearing: Any) -> None:
    class Growing(hearing):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def encode(self, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
            self.kept.append(torch.ones(8 << 20))  # 32 MB
            return super().encode(inputs)

    def activations(factor: float) -> int:
        h = tiny.Harness(
            Growing(), media=MediaSettings(largest=lambda: [LargestItem(item(40, 6), factor)])
        )
        return int(h.worker.profile().activations)

    assert activations(4.0) > 3 * (32 << 20)
    assert activations(1.0) < 3 * (32 << 20)


@pytest.fixture
def watching(tiny: Any) -> Any:
    """A decoder whose placeholders get vectors."""

    class WatchingLM(tiny.LM):  # type: ignore[misc, name-defined]
        modalities = ("audio",)

        def __init__(self) -> None:
            super().__init__()
            self.embedded: list[int] = []
            self.given: list[int] = []

        def embed_media(
            self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
        ) -> Sequence[Tensor]:
            assert modality == "audio"
            self.embedded.append(len(inputs))
            return [one["vectors"] for one in inputs]

        def forward(self, batch: ForwardBatch) -> Tensor:
            x = self.embed[batch.input_ids]
            given = batch.extra.get(INPUT_EMBEDS)
            self.given.append(0 if given is None else len(given.rows))
            if given is not None:
                x = x.index_copy(0, given.rows, given.values)
            x = x + self.place[batch.positions]
            for layer in self.layers:
                x = layer(x, batch)
            return x if batch.logits_rows is None else x[batch.logits_rows]

        @torch.no_grad()
        def seen_greedy(self, prompt: list[int], media: Sequence[MediaInput], n: int) -> list[int]:
            tokens = list(prompt)
            for _ in range(n):
                x = self.embed[torch.tensor(tokens)].clone()
                for one in media:
                    x[one.offset : one.offset + one.num_tokens] = vectors(one)
                x = x + self.place[torch.arange(len(tokens))]
                for layer in self.layers:
                    x = layer.dense(x)
                tokens.append(int((x @ self.head)[-1].argmax()))
            return tokens[len(prompt) :]

    return WatchingLM


@pytest.mark.parametrize("chunks", [[14], [3, 4, 7], [1] * 14, [2, 1, 11], [9, 5]])
def test_items_are_embedded_once_however_the_prompt_is_cut(
    tiny: Any, watching: Any, chunks: list[int]
) -> None:
    h = tiny.Harness(watching())
    media = [item(4, 1, offset=2), item(3, 2, offset=8)]
    prompt = [5, 6, *[0] * 4, 7, 8, *[0] * 3, 9, 10, 11]
    new = h.new("a", prompt, GREEDY, first=chunks[0], media=media)
    tokens: list[int] = []
    for step, count in enumerate([*chunks, 1, 1]):
        [result] = h.step({"a": count}, [new] if step == 0 else []).requests.values()
        assert result.error is None
        tokens += result.token_ids
    assert tokens == h.model.seen_greedy(prompt, media, 3)
    assert sum(h.model.embedded) == 2
    assert sum(h.model.given) == 7
    assert h.model.given[-2:] == [0, 0], "steps without media have nothing that is given"


def test_what_a_cached_prefix_covers_is_not_embedded(tiny: Any, watching: Any) -> None:
    h = tiny.Harness(watching())
    media = [item(4, 1, offset=0), item(4, 2, offset=6)]
    prompt = [*[0] * 4, 7, 8, *[0] * 4, 9]
    first = h.new("a", prompt, GREEDY, media=media)
    wanted = h.step({"a": 11}, [first]).requests["a"].token_ids
    again = h.new("b", prompt, GREEDY, media=media)
    again.block_ids = first.block_ids  # as a manager would: the same content
    again.num_computed_tokens = 8  # cut inside of the second item
    h.model.embedded.clear()
    assert h.step({"b": 3}, [again]).requests["b"].token_ids == wanted
    assert h.model.embedded == [1]
    assert h.model.given[-1] == 2


def test_rows_are_used_again_without_their_media(tiny: Any, watching: Any) -> None:
    h = tiny.Harness(watching())
    h.step({"a": 2}, [h.new("a", [0, 0, 0, 4], GREEDY, first=2, media=[item(3, 1, offset=0)])])
    plain = h.new("b", [1, 2, 3, 4], GREEDY)
    assert h.step({"b": 4}, [plain], ["a"]).requests["b"].token_ids == h.model.dense_greedy(
        [1, 2, 3, 4], 1
    )
    assert h.model.given[-1] == 0


def aligned(h: Any, name: str, tokens: list[int], media: Sequence[MediaInput]) -> Any:
    new = h.new(name, tokens, GREEDY, media=media)
    new.request.pooling = PoolingParams(task="align")
    return new


def test_alignment_is_computed_beside_requests_that_decode(tiny: Any, hearing: Any) -> None:
    class Aligning(hearing):  # type: ignore[misc]
        def align(self, batch: ForwardBatch, inputs: Mapping[str, Tensor]) -> Tensor:
            assert batch.encoder_states is not None
            self.forward(batch)
            return batch.input_ids[:, None] * inputs["vectors"][:, 0]

    h = tiny.Harness(Aligning())
    heard, other = item(7, 1), item(5, 2)
    h.step({"a": 5}, [h.new("a", PROMPT, GREEDY, media=[heard])])
    new = [aligned(h, "x", [3, 4, 5], [other]), h.new("b", PROMPT, GREEDY, media=[other])]
    results = h.step({"a": 1, "x": 3, "b": 5}, new).requests
    assert list(results) == ["a", "x", "b"]
    wanted = torch.tensor([3.0, 4.0, 5.0])[:, None] * vectors(other)[:, 0]
    assert results["x"].token_ids == []
    torch.testing.assert_close(torch.tensor(results["x"].pooled.tolist()), wanted)
    assert results["a"].token_ids == h.model.heard_greedy(PROMPT, heard, 2)[1:]
    assert results["b"].token_ids == h.model.heard_greedy(PROMPT, other, 1)


def test_what_cannot_be_aligned_fails_alone(tiny: Any, hearing: Any) -> None:
    class Raising(hearing):  # type: ignore[misc]
        def align(self, batch: ForwardBatch, inputs: Mapping[str, Tensor]) -> Tensor:
            raise ValueError("no heads")

    for model, message in ((hearing, "has no align"), (Raising, "ValueError: no heads")):
        h = tiny.Harness(model())
        new = [aligned(h, "x", [3], [item(5, 2)]), h.new("a", PROMPT, GREEDY, media=[item(7, 1)])]
        results = h.step({"x": 1, "a": 5}, new).requests
        assert message in results["x"].error
        assert results["a"].token_ids == h.model.heard_greedy(PROMPT, item(7, 1), 1)


def test_a_sequence_is_aligned_whole(tiny: Any, hearing: Any) -> None:
    class Aligning(hearing):  # type: ignore[misc]
        def align(self, batch: ForwardBatch, inputs: Mapping[str, Tensor]) -> Tensor:
            raise AssertionError

    h = tiny.Harness(Aligning())
    new = aligned(h, "x", [3, 4, 5], [item(5, 2)])
    error = h.step({"x": 2}, [new]).requests["x"].error
    assert "2 of 3 tokens with 1 items" in error
