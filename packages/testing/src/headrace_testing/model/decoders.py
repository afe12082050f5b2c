"""The tests that a model family inherits: equality with Hugging Face transformers on tiny models.

Inherit from :class:`ModelConformance`, say which transformers classes are the reference and how a
checkpoint is resolved and loaded, and keep the tests. Needs torch, transformers and safetensors.

Also here, because a model cannot be run without them: an attention backend over core's ops, a plain
quantization method, a driver of the paged cache, and a group of ranks in threads.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.attention import (
    LARGEST,
    LAST_KEYS,
    MLA,
    SLIDING_WINDOW,
    SOFT_CAP,
    SPARSE_TOPK,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
    EncoderBackend,
    MLABackend,
)
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.errors import WeightsError
from headrace_core.kv import (
    CACHE_DTYPES,
    ROW_SCALE_BYTES,
    ROW_SCALED_BITS,
    CacheSpec,
    KVCacheSpec,
    MLASpec,
    RecurrentSpec,
)
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed, TensorSpec
from headrace_core.model import (
    AttentionLayer,
    BuildContext,
    CausalLM,
    ModelInfo,
    SupportsRecurrence,
)
from headrace_core.ops import KernelNeed, OpTable, PackedLinear, bind_ops
from headrace_core.parallel import Communicator, SingleProcess
from headrace_testing.ops.row_scales import split_rows
from headrace_testing.sampling import turns

BLOCK_SIZE = 8


class ReferenceAttention(AttentionBackend):
    """Core's ops and nothing else; metadata is the batch itself."""

    name = "reference"
    supported_attention_types = ("decoder", "encoder_decoder")
    supported_kv_cache_dtypes = tuple(CACHE_DTYPES)

    @classmethod
    def refuse(cls, need: AttentionNeed) -> list[str]:
        """Extras go to the op as they are, so that a feature of any family is served if the op has it."""
        return super().refuse(
            dataclasses.replace(need, features=need.features & {MLA, SPARSE_TOPK})
        )

    def prepare(self, batch: ForwardBatch, group: int) -> Any:
        return batch, batch.groups[group]

    def forward(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: Any,
    ) -> Tensor:
        if kv_cache is None:
            return torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        batch, group = metadata
        views = self.views(kv_cache)
        if key is not None and value is not None:
            self.ops.cache_write(
                key, value, *views, group.slot_mapping, k_scale=layer.k_scale, v_scale=layer.v_scale
            )
        own = group.seq_lens is not None
        return self.ops.paged_attention(
            query,
            views.key_cache,
            views.value_cache,
            group.block_table,
            batch.cu_seqlens_q,
            group.seq_lens if own else batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=group.max_seqlen_k if own else batch.max_seqlen_k,
            causal=layer.attention_type == "decoder",
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            **{
                **({} if batch.last_keys is None else {LAST_KEYS: batch.last_keys}),
                **layer.extras,
            },
        )


class ReferenceMLABackend(MLABackend):
    """Core's ops and nothing else; metadata is the batch itself."""

    name = "reference-latent"
    supported_features = frozenset({MLA, SPARSE_TOPK})
    supported_kv_cache_dtypes = tuple(CACHE_DTYPES)

    def prepare(self, batch: ForwardBatch, group: int) -> Any:
        return batch, batch.groups[group]

    def attend(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        rope_query: Tensor,
        latent: Tensor | None,
        rope_key: Tensor | None,
        kv_cache: Tensor | None,
        metadata: Any,
        *,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        if kv_cache is None:
            return torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        batch, group = metadata
        if latent is not None and rope_key is not None:
            self.ops.mla_cache_write(
                latent, rope_key, kv_cache, group.slot_mapping, k_scale=layer.k_scale
            )
        return self.ops.mla_attention(
            query,
            rope_query,
            kv_cache,
            group.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=layer.scale,
            topk_indices=topk_indices,
            k_scale=layer.k_scale,
        )


class ReferenceEncoderAttention(EncoderBackend):
    """Core's op and nothing else."""

    name = "reference-encoder"
    supported_features = frozenset({SLIDING_WINDOW, SOFT_CAP})

    def attend(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        distance_bias: Tensor | None = None,
        key_lens: Tensor | None = None,
    ) -> Tensor:
        return self.ops.varlen_attention(
            query,
            key,
            value,
            cu_seqlens,
            max_seqlen=max_seqlen,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            distance_bias=distance_bias,
            key_lens=key_lens,
            **layer.extras,
        )


class PlainQuant(QuantMethod, LinearMethod):
    """Weights as they are."""

    name: ClassVar[str] = "plain"
    is_plain: ClassVar[bool] = True

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> PlainQuant:
        return cls(ops)

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return self

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((spec.out_features, spec.in_features), None, in_dim=1)}

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        return self.ops.linear.pack(tensors["weight"])

    def apply(self, state: PackedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.ops.linear(x, state, bias)


class RecordingQuant(PlainQuant):
    """Weights as they are; remembers which layers asked."""

    def __init__(self, ops: OpTable) -> None:
        super().__init__(ops)
        self.specs: list[LinearSpec] = []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        self.specs.append(spec)
        return self


class ThreadRank(Communicator):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, board: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank, self._board, self._barrier = rank, board, barrier

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._board)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._board[self._rank] = tensor.clone()
        self._barrier.wait(timeout=60)
        everyone = [entry for entry in self._board if entry is not None]
        self._barrier.wait(timeout=60)
        return everyone

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange(tensor), dim=dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self._exchange(tensor)[source]

    def barrier(self) -> None:
        self._barrier.wait(timeout=60)


def run_ranks(world_size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """Results of ``work`` on each rank of a group of threads."""
    board: list[Tensor | None] = [None] * world_size
    barrier = threading.Barrier(world_size)

    def one(rank: int) -> Any:
        try:
            return work(ThreadRank(rank, board, barrier))
        except BaseException:
            barrier.abort()  # so that the others fail at once
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(one, r) for r in range(world_size)]]


def build_context(
    info: ModelInfo,
    *,
    ops: OpTable | None = None,
    quant: QuantMethod | None = None,
    communicator: Communicator | None = None,
    backend: type[AttentionBackend] = ReferenceAttention,
    block_size: int = BLOCK_SIZE,
    kv_cache_dtype: str = "auto",
) -> BuildContext:
    """Everything for a model on the CPU, with the reference ops unless others are given."""
    need = KernelNeed(device="cpu", dtype=info.dtype)
    ops = ops or bind_ops(need, choose={"*": "reference"})
    chosen: dict[AttentionNeed, AttentionBackend] = {}

    def attention(need: AttentionNeed) -> AttentionBackend:
        made = ReferenceMLABackend if MLA in need.features else backend
        reasons = made.refuse(need)
        assert not reasons, reasons
        return chosen.setdefault(need, made(ops))

    return BuildContext(
        config=info.config,
        dtype=info.dtype,
        device="cpu",
        ops=ops,
        quant=quant or PlainQuant(ops),
        communicator=communicator or SingleProcess(),
        attention=attention,
        encoder_attention=lambda need: ReferenceEncoderAttention(ops),
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=info.max_model_len,
        pooling=info.pooling,
        path=info.path,
        whole_config=info.whole_config,
        generation_config=info.generation_config,
        trust_remote_code=info.trust_remote_code,
    )


@dataclass
class _Sequence:
    num_computed_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    states: list[dict[int, int]] = field(default_factory=list)
    """By group: the block with the state after so many tokens, for each step's end."""


class PagedDriver:
    """Runs a model over a paged cache, the smallest way: blocks are never given back.

    Layers with equal cache specs share a group. Unwritten cache holds a large number, so that
    reading what was not written shows. A recurrent layer's state goes to another block in each step.

    Args:
        shuffled: hand out blocks in random order, or (False) in ascending order.
    """

    def __init__(
        self, model: CausalLM, *, num_blocks: int = 128, shuffled: bool = True, seed: int = 0
    ) -> None:
        self.model = model
        self.layers = model.attention_layers()
        recurrent = model.state_layers() if isinstance(model, SupportsRecurrence) else {}
        needed: list[CacheSpec | None] = [layer.kv_spec for layer in self.layers.values()]
        needed += [state_layer.kv_spec for state_layer in recurrent.values()]
        specs = self.specs = list(dict.fromkeys(spec for spec in needed if spec is not None))
        caches: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        for name, layer in self.layers.items():
            target = layer.spec.kv_sharing_target
            spec = self.layers[target].kv_spec if target is not None else layer.kv_spec
            assert spec is not None
            if target is None:
                caches[name] = _cache_of(layer, spec, num_blocks)
            numbers, scales = caches[target or name]
            if scales:
                layer.spec = dataclasses.replace(layer.spec, **scales)
            layer.bind_cache(numbers, specs.index(spec))
        for state_layer in recurrent.values():
            shapes = state_layer.kv_spec.states
            states = [_unwritten((num_blocks, *s.shape), s.dtype) for s in shapes]
            state_layer.bind_states(states, specs.index(state_layer.kv_spec))
        self.free = list(range(num_blocks - 1, 0, -1))
        if shuffled:
            random.Random(seed).shuffle(self.free)
        self.sequences: dict[str, _Sequence] = {}

    def step(
        self, chunks: Mapping[str, Sequence[int]], rows: Sequence[int] | None = None
    ) -> Tensor:
        """Feed each request its next tokens; logits [T, V] of all rows (or the given ones)."""
        batch = self.batch(chunks, rows)
        with torch.inference_mode():
            return self.model.compute_logits(self.model.forward(batch)).float()

    def preempt(self, request: str) -> None:
        """Take all that a request has cached; it begins again, in other blocks."""
        del self.sequences[request]

    def share(self, request: str, num_tokens: int, new: str) -> None:
        """Begin a request that finds the first tokens of another cached.

        Args:
            num_tokens: whole blocks, and the end of one of the other's steps.
        """
        other = self.sequences[request]
        count, rest = divmod(num_tokens, self.specs[0].block_size)
        assert not rest
        self.sequences[new] = _Sequence(
            num_tokens,
            [table[:count] for table in other.tables],
            [{num_tokens: blocks[num_tokens]} if blocks else {} for blocks in other.states],
        )

    def batch(
        self, chunks: Mapping[str, Sequence[int]], rows: Sequence[int] | None = None
    ) -> ForwardBatch:
        """The forward batch of these chunks; counts them as computed."""
        positions: list[int] = []
        bounds, lengths = [0], []
        spans: list[tuple[_Sequence, int, int]] = []
        for request, tokens in chunks.items():
            empty = _Sequence(0, [[] for _ in self.specs], [{} for _ in self.specs])
            sequence = self.sequences.setdefault(request, empty)
            start = sequence.num_computed_tokens
            end = sequence.num_computed_tokens = start + len(tokens)
            spans.append((sequence, start, end))
            positions += range(start, end)
            bounds.append(bounds[-1] + len(tokens))
            lengths.append(end)
        groups = tuple(
            self._states(group, spans)
            if isinstance(spec, RecurrentSpec)
            else self._tokens(group, spec.block_size, spans)
            for group, spec in enumerate(self.specs)
        )
        batch = ForwardBatch(
            input_ids=torch.tensor([t for tokens in chunks.values() for t in tokens]),
            positions=torch.tensor(positions),
            cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            max_seqlen_q=max(len(tokens) for tokens in chunks.values()),
            max_seqlen_k=max(lengths),
            groups=groups,
            logits_rows=None if rows is None else torch.tensor(list(rows)),
        )
        return self.prepared(batch)

    def _tokens(
        self, group: int, block_size: int, spans: Sequence[tuple[_Sequence, int, int]]
    ) -> GroupBatch:
        tables, slots = [sequence.tables[group] for sequence, _, _ in spans], []
        for table, (_, start, end) in zip(tables, spans):
            while len(table) * block_size < end:
                table.append(self.free.pop())
            slots += [
                table[p // block_size] * block_size + p % block_size for p in range(start, end)
            ]
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        return GroupBatch(torch.tensor(padded, dtype=torch.int32), torch.tensor(slots))

    def _states(self, group: int, spans: Sequence[tuple[_Sequence, int, int]]) -> GroupBatch:
        before = [sequence.states[group].get(start, -1) for sequence, start, _ in spans]
        for sequence, _, end in spans:
            sequence.states[group][end] = self.free.pop()
        after = [sequence.states[group][end] for sequence, _, end in spans]
        nothing = torch.zeros((len(spans), 0), dtype=torch.int32)
        return GroupBatch(
            nothing,
            torch.zeros(0, dtype=torch.int64),
            state_in=torch.tensor(before),
            state_out=torch.tensor(after),
        )

    def prepared(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with attention's metadata for what it holds."""
        backends: dict[int, AttentionBackend] = {}
        for layer in self.layers.values():
            if layer.kv_spec is not None:
                backends[self.specs.index(layer.kv_spec)] = layer.backend
        metadata = tuple(
            backends[group].prepare(batch, group) if group in backends else None
            for group in range(len(self.specs))
        )
        values = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
        return ForwardBatch(**{**values, "attention": metadata})


def _cache_of(
    layer: AttentionLayer, spec: CacheSpec, num_blocks: int
) -> tuple[Tensor, dict[str, Any]]:
    """A cache for one layer, in its logical shape over its backend's order, and the scales in it."""
    assert isinstance(spec, KVCacheSpec)
    shape = layer.backend.cache_shape(spec, num_blocks)
    order = layer.backend.cache_stride_order()
    rows = _unwritten([shape[dim] for dim in order], spec.dtype)
    scales: dict[str, Any] = {}
    if isinstance(spec, MLASpec) and spec.row_scales:
        scales["k_scale"] = rows[..., -2 * ROW_SCALE_BYTES :].view(torch.float32)
    elif spec.row_scales:
        rows, behind = split_rows(rows, spec)
        logical = behind.permute([order.index(dim) for dim in range(behind.dim())])
        scales = {"k_scale": logical[0], "v_scale": logical[1]}
    stored = rows[..., : spec.row_numbers]
    return stored.permute([order.index(dim) for dim in range(len(order))]), scales


def _unwritten(shape: Sequence[int], dtype: str) -> Tensor:
    """A cache full of a large number; scales that stand in one are large, too."""
    if dtype in ROW_SCALED_BITS:
        kind = torch.int8 if ROW_SCALED_BITS[dtype] == 8 else torch.uint8
        return torch.full(shape, 0x47, dtype=kind)
    number = min(1e3, LARGEST.get(dtype, 1e3))
    name = "float8_e4m3fn" if dtype == "float8_e4m3" else dtype
    return torch.full(shape, number).to(getattr(torch, name))


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights that make every term of a model matter: no flat logits, no zero bias, no norm of 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):  # decays slow enough to remember many tokens
                parameter.copy_(0.5 * noise - 2.0)
            elif parameter.dim() < 2:
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            elif "embed" in name or ".wte" in name or ".wpe" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model: what transformers holds, and where it was saved."""

    reference: Any
    path: Path

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), V] float32, by transformers."""
        with torch.inference_mode():
            logits = self.reference(torch.tensor([list(tokens)])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens, by transformers without a cache."""
        sequence = list(tokens)
        for _ in range(count):
            sequence.append(int(self.logprobs(sequence)[-1].argmax()))
        return sequence[len(tokens) :]


@turns(3)
class ModelConformance(ABC):
    """Inherit, fill in the four methods below, and keep the tests.

    The config should be tiny and odd: windows and original contexts shorter than
    :attr:`prompt_len`, grouped heads, sizes that are no powers of two.
    """

    prompt_len: ClassVar[int] = 37
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of log-probabilities in float32."""
    max_model_len: ClassVar[int | None] = 64
    flips_ties: ClassVar[bool] = True
    """True if the family exists with tied and with untied embeddings."""
    tensor_parallel: ClassVar[int] = 2
    """Ranks of the tensor-parallel test; 1 skips it."""

    @abstractmethod
    def hf_config(self, **overrides: Any) -> Any:
        """The transformers config of a tiny model (vocabulary up to 200)."""

    @abstractmethod
    def hf_class(self) -> Any:
        """The transformers class."""

    @abstractmethod
    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        """Resolve a checkpoint; ``settings`` are fields of ``ModelConfig``."""

    @abstractmethod
    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        """Build and fill; ``settings`` are fields of ``LoadConfig``."""

    # ---- helpers

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        reference = self.hf_class()._from_config(
            self.hf_config(**overrides), attn_implementation="eager", dtype=torch.float32
        )
        reference.eval()
        randomise(reference, seed)
        reference.save_pretrained(folder)
        return Checkpoint(reference, folder)

    def open(self, path: Path, **settings: Any) -> CausalLM:
        settings = {"max_model_len": self.max_model_len, **settings}
        info = self.resolve(path, **settings)
        return self.load(info, build_context(info))

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        chooser = random.Random(seed)
        return [chooser.randrange(3, int(self.hf_config().vocab_size)) for _ in range(length)]

    def assert_close(self, logits: Tensor, expected: Tensor) -> None:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        # Very unlikely tokens have large log-probabilities, whose last digits are the machine's.
        torch.testing.assert_close(logprobs, expected, atol=self.tolerance, rtol=1e-5)

    # ---- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
        return cls().make_checkpoint(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, checkpoint: Checkpoint) -> CausalLM:
        return cls().open(checkpoint.path)

    # ---- numbers

    def test_reference_is_not_flat(self, checkpoint: Checkpoint) -> None:
        """If every token were as likely as any other, the tests below would prove nothing."""
        logprobs = checkpoint.logprobs(self.prompt(self.prompt_len))
        assert float(logprobs.std()) > 0.5

    @turns(1)
    def test_one_request(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        prompt = self.prompt(self.prompt_len)
        logits = PagedDriver(model, shuffled=False).step({"a": prompt})
        assert logits.dtype == torch.float32
        self.assert_close(logits, checkpoint.logprobs(prompt))

    @turns(1)
    def test_decoding_step_by_step(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        prompt, driver = self.prompt(self.prompt_len, seed=1), PagedDriver(model)
        next_token = int(driver.step({"a": prompt})[-1].argmax())
        generated = [next_token]
        for _ in range(7):
            next_token = int(driver.step({"a": [next_token]})[-1].argmax())
            generated.append(next_token)
        assert generated == checkpoint.greedy(prompt, 8)

    def test_requests_of_different_lengths(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        prompts = {
            name: self.prompt(length, seed)
            for seed, (name, length) in enumerate((("a", 5), ("b", self.prompt_len), ("c", 1)))
        }
        driver = PagedDriver(model)
        expected = torch.cat([checkpoint.logprobs(tokens) for tokens in prompts.values()])
        self.assert_close(driver.step(prompts), expected)
        more = {"c": [7], "a": [9], "b": [11, 12]}  # decoding and a chunk, in another order
        expected = torch.cat(
            [checkpoint.logprobs(prompts[n] + new)[-len(new) :] for n, new in more.items()]
        )
        self.assert_close(driver.step(more), expected)

    def test_prefill_in_chunks(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        prompt, driver = self.prompt(self.prompt_len, seed=2), PagedDriver(model)
        other = self.prompt(4, seed=3)
        pieces = [
            driver.step({"a": prompt[:7]}),
            driver.step({"b": other, "a": prompt[7:20]})[len(other) :],
            driver.step({"a": prompt[20:]}),
        ]
        self.assert_close(torch.cat(pieces), checkpoint.logprobs(prompt))

    def test_preemption(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        """The cache is lost after some tokens: prompt and output are computed again."""
        prompt, driver = self.prompt(self.prompt_len, seed=4), PagedDriver(model)
        sequence = [*prompt, int(driver.step({"a": prompt})[-1].argmax())]
        sequence.append(int(driver.step({"a": sequence[-1:]})[-1].argmax()))
        driver.preempt("a")
        driver.step({"a": sequence[:11], "b": prompt[:3]})
        sequence.append(int(driver.step({"a": sequence[11:]})[-1].argmax()))
        assert sequence[len(prompt) :] == checkpoint.greedy(prompt, 3)

    def test_prefix_hit(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        """Two requests begin in the same blocks and go on in their own."""
        prompt, driver = self.prompt(self.prompt_len, seed=5), PagedDriver(model)
        hit = 2 * BLOCK_SIZE
        other = prompt[:hit] + self.prompt(9, seed=6)
        driver.step({"a": prompt[:hit]})
        driver.share("a", hit, "b")
        logits = driver.step({"b": other[hit:], "a": prompt[hit:]})
        expected = (checkpoint.logprobs(other)[hit:], checkpoint.logprobs(prompt)[hit:])
        self.assert_close(logits, torch.cat(expected))

    def test_chosen_rows_equal_all_rows(self, model: CausalLM) -> None:
        prompt = self.prompt(self.prompt_len)
        everything = PagedDriver(model).step({"a": prompt})
        chosen = PagedDriver(model).step({"a": prompt}, rows=[3, self.prompt_len - 1])
        torch.testing.assert_close(chosen, everything[[3, self.prompt_len - 1]], atol=1e-5, rtol=0)

    def test_profiling_run_without_cache(self, checkpoint: Checkpoint) -> None:
        model = self.open(checkpoint.path)
        batch = ForwardBatch(
            input_ids=torch.zeros(6, dtype=torch.int64),
            positions=torch.arange(6),
            cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32),
            seq_lens=torch.tensor([6], dtype=torch.int32),
            max_seqlen_q=6,
            max_seqlen_k=6,
            groups=(),
        )
        with torch.inference_mode():
            logits = model.compute_logits(model.forward(batch))
        assert logits.shape == (6, self.hf_config().vocab_size)
        assert bool(logits.isfinite().all())

    def test_tied_embeddings_the_other_way(self, tmp_path: Path) -> None:
        if not self.flips_ties:
            pytest.skip("this family exists in one way only")
        tied = not bool(getattr(self.hf_config(), "tie_word_embeddings", False))
        other = self.make_checkpoint(tmp_path, seed=1, tie_word_embeddings=tied)
        prompt = self.prompt(12)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        self.assert_close(logits, other.logprobs(prompt))

    def test_bfloat16(self, checkpoint: Checkpoint) -> None:
        prompt = self.prompt(16)
        logits = PagedDriver(self.open(checkpoint.path, dtype="bfloat16")).step({"a": prompt})
        expected = checkpoint.logprobs(prompt)
        logprobs = torch.log_softmax(logits, dim=-1)
        cosine = torch.cosine_similarity(logprobs, expected, dim=-1)
        assert float(cosine.min()) > 0.97

    def test_tensor_parallel(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        if self.tensor_parallel == 1:
            pytest.skip("the tiny config does not divide")
        prompt = self.prompt(self.prompt_len)
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)

        def work(communicator: Communicator) -> Tensor:
            part = self.load(info, build_context(info, communicator=communicator))
            return PagedDriver(part).step({"a": prompt})

        expected = checkpoint.logprobs(prompt)
        for logits in run_ranks(self.tensor_parallel, work):
            self.assert_close(logits, expected)

    def test_linear_layers_are_stored_as_quantization_says(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        context = build_context(info)
        asked = RecordingQuant(context.ops)
        self.load(info, dataclasses.replace(context, quant=asked))
        layers = int(getattr(self.hf_config(), "num_hidden_layers", 1))
        assert len(asked.specs) > layers, "linear layers must get their method from context.quant"

    # ---- loading

    def test_sharded_checkpoint_equals_single(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        checkpoint.reference.save_pretrained(tmp_path, max_shard_size="40KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    def test_eager_loading_equals_lazy(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        eager = self.load(info, build_context(info), safetensors_load_strategy="eager")
        prompt = self.prompt(9)
        logits = PagedDriver(eager).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    def test_dummy_weights_are_deterministic(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        prompt = self.prompt(9)
        first, second = (
            PagedDriver(self.load(info, build_context(info), load_format="dummy")).step(
                {"a": prompt}
            )
            for _ in range(2)
        )
        assert bool(first.isfinite().all())
        assert torch.equal(first, second)

    def test_missing_tensor(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        name = self._rewrite(checkpoint, tmp_path, lambda tensors, name: tensors.pop(name))
        self._assert_refused(tmp_path, name)

    def test_tensor_of_wrong_shape(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        def cut(tensors: dict[str, Tensor], name: str) -> None:
            tensors[name] = tensors[name][:-1].contiguous()

        name = self._rewrite(checkpoint, tmp_path, cut)
        self._assert_refused(tmp_path, name, "model.safetensors", "shape")

    def test_tensor_of_wrong_dtype(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        def change(tensors: dict[str, Tensor], name: str) -> None:
            tensors[name] = tensors[name].to(torch.int8)

        name = self._rewrite(checkpoint, tmp_path, change)
        self._assert_refused(tmp_path, name, "model.safetensors", "int8")

    def test_left_over_tensor(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        def add(tensors: dict[str, Tensor], name: str) -> None:
            tensors["model.extra_adapter.weight"] = torch.zeros(3)

        self._rewrite(checkpoint, tmp_path, add)
        self._assert_refused(tmp_path, "model.extra_adapter.weight", "model.safetensors")

    def _rewrite(
        self, checkpoint: Checkpoint, folder: Path, change: Callable[[dict[str, Tensor], str], Any]
    ) -> str:
        """Copy a checkpoint with one matrix changed; returns its name."""
        from safetensors.torch import load_file, save_file

        for file in checkpoint.path.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(checkpoint.path / "model.safetensors")
        name = sorted(n for n, tensor in tensors.items() if tensor.dim() == 2 and ".1." in n)[0]
        change(tensors, name)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return name

    def _assert_refused(self, folder: Path, *words: str) -> None:
        with pytest.raises(WeightsError) as caught:
            self.open(folder)
        for word in words:
            assert word in str(caught.value), word
