"""Small pooling models and engines over them: real worker, scheduler and clients, no checkpoint.

``Causal`` has one attention layer over the paged cache; ``Bidirectional`` mixes each token with the
mean of its whole prompt, so any row that is missing or foreign changes every result. ``dense`` computes
the same for one prompt without a batch, a cache or pages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from headrace_core.attention import AttentionBackend, AttentionLayerSpec
from headrace_core.batch import ForwardBatch
from headrace_core.executor import Executor
from headrace_core.kv import FullAttentionSpec
from headrace_core.model import PoolingBatch, Rows
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_core.pooling import TOKEN_TASKS, PoolingInfo, PoolingParams
from headrace_core.served_model import ServedModel
from headrace_core.step import ScheduledStep, StepResult
from headrace_core.text import EncodedPair
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace_engine.core import EngineCore
from headrace_engine.engine import Engine
from headrace_engine.execution import ModelWorker
from headrace_engine.execution.capture import Capture
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.offline import OfflineEngine
from headrace_engine.startup import StartupTimeline
from headrace_engine.worker.settings import WorkerLimits, WorkerSettings
from headrace_reference.attention import attend
from headrace_testing.fakes.engine import fake_served_model
from headrace_testing.model.decoders import ReferenceAttention

VOCAB, HIDDEN, HEADS, HEAD_DIM, BLOCK = 128, 8, 2, 4, 8
CLS, SEP = 1, 2
TASKS = ("embed", "token_embed", "classify", "score", "token_classify", "plugin")


class Tokens:
    """A tokenizer of ASCII: ids are code points; [CLS] and [SEP] around and between texts."""

    vocab_size = VOCAB
    bos_token_id = None
    eos_token_id = SEP
    special_token_ids = frozenset({CLS, SEP})
    chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    special_tokens: dict[str, str] = {"sep_token": "\x02", "mask_token": "\x03"}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_pair(text, add_special_tokens=add_special_tokens).token_ids

    def encode_pair(
        self,
        first: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        truncation_side: str = "left",
    ) -> EncodedPair:
        texts = [[ord(c) for c in text] for text in (first, second) if text is not None]
        special = (1 + len(texts)) * add_special_tokens
        if max_length is not None and len(texts) == 1:
            room, (text,) = max(0, max_length - special), texts
            right = truncation_side == "right"
            texts = [text[:room] if right else text[max(0, len(text) - room) :]]
        ids, types = [CLS] * add_special_tokens, [0] * add_special_tokens
        for index, text in enumerate(texts):
            ids += text + [SEP] * add_special_tokens
            types += [index] * (len(text) + add_special_tokens)
        return EncodedPair(ids, types)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))

    def token_string(self, token_id: int) -> str:
        return chr(token_id)


class StubPooler:
    """LAST, MEAN or ALL of the hidden states; a head of two numbers for classification."""

    def __init__(self, info: PoolingInfo, poison: int | None) -> None:
        self.info = info
        self.tasks = info.tasks
        self.poison = poison
        self.batches: list[int] = []
        """Prompts of each call."""

    def rows(self, params: PoolingParams) -> Rows:
        if params.task in TOKEN_TASKS or self.info.pooling_type == "MEAN":
            return "all"
        return "first" if self.info.pooling_type == "CLS" else "last"

    def __call__(self, batch: PoolingBatch) -> list[Tensor]:
        self.batches.append(len(batch.params))
        bounds = batch.cu_rows.tolist()
        parts = [batch.hidden[a:b] for a, b in itertools.pairwise(bounds)]
        return [self.one(*given) for given in zip(parts, batch.params, batch.token_ids)]

    def one(self, rows: Tensor, params: PoolingParams, token_ids: Sequence[int]) -> Tensor:
        states = rows.float()
        if params.task not in TOKEN_TASKS:
            begin = min(params.num_left_out or 0, len(states) - 1)
            states = states[begin:].mean(0) if self.info.pooling_type == "MEAN" else states[-1]
        if params.task in ("embed", "token_embed"):
            states = states[..., : params.dimensions]
            if params.normalize:
                states = torch.nn.functional.normalize(states, dim=-1)
        else:
            states = states[..., :2] if params.task != "score" else states[..., :1]
            if params.use_activation:
                states = states.sigmoid()
        return states * torch.nan if self.poison in token_ids else states


class Bidirectional(torch.nn.Module):
    """No attention layer, no cache."""

    def __init__(self, info: PoolingInfo, poison: int | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.types = torch.nn.Parameter(torch.randn(2, HIDDEN, generator=generator))
        self.place = torch.nn.Parameter(torch.randn(2048, HIDDEN, generator=generator))
        self.info = info
        self.pooler = StubPooler(info, poison)
        self.steps: list[int] = []
        """Tokens of each forward pass."""
        self.filled: list[bool] = []
        """Whether any of them were attended to by none."""

    def attention_layers(self) -> Mapping[str, Any]:
        return {}

    def forward(self, batch: ForwardBatch) -> Tensor:
        assert (batch.token_type_ids is not None) == self.info.token_types
        self.steps.append(batch.num_tokens)
        x = self.embedded(batch.input_ids, batch.positions, batch.token_type_ids)
        bounds = batch.cu_seqlens_q.tolist()
        seen = batch.seq_lens if batch.key_lens is None else batch.key_lens
        self.filled.append(batch.key_lens is not None)
        x = torch.cat(
            [self.mixed(x[a:b], n) for (a, b), n in zip(itertools.pairwise(bounds), seen.tolist())]
        )
        return x if batch.logits_rows is None else x[batch.logits_rows]

    def embedded(self, ids: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        x = self.table[ids] + self.place[positions]
        return x if types is None else x + self.types[types]

    def mixed(self, x: Tensor, num_keys: int | None = None) -> Tensor:
        return x + x[:num_keys].mean(0)

    @torch.no_grad()
    def dense(
        self,
        ids: Sequence[int],
        types: Sequence[int] | None = None,
        num_keys: int | None = None,
        **params: Any,
    ) -> Tensor:
        """The result of one prompt, of whose tokens the first ``num_keys`` are attended to."""
        given = PoolingParams(**params)
        given.verify(given.task or "embed", self.info)
        if self.info.token_types:
            types = types or [0] * len(ids)
        kinds = None if types is None else torch.tensor(types)
        x = self.embedded(torch.tensor(ids), torch.arange(len(ids)), kinds)
        return self.pooler.one(self.mixed(x, num_keys), given, ids)


class CausalLayer:
    """Attention without projections."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.spec = AttentionLayerSpec("layer", HEADS, HEADS, HEAD_DIM, 1.0)
        self.kv_spec = FullAttentionSpec(BLOCK, HEADS, HEAD_DIM, "float32")
        self.backend = backend
        self.cache: Tensor | None = None
        self.group = 0

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        self.cache, self.group = kv_cache, group


class Causal(Bidirectional):
    """One attention layer over the paged cache."""

    def __init__(self, info: PoolingInfo, poison: int | None = None) -> None:
        super().__init__(info, poison)
        self.layer = CausalLayer(ReferenceAttention(reference_ops()))

    def attention_layers(self) -> Mapping[str, Any]:
        return {"layer": self.layer}

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.steps.append(batch.num_tokens)
        x = self.embedded(batch.input_ids, batch.positions, batch.token_type_ids)
        heads = x.view(-1, HEADS, HEAD_DIM)
        layer, metadata = self.layer, batch.attention[0] if batch.attention else None
        out = layer.backend.forward(layer.spec, heads, heads, heads, layer.cache, metadata)
        x = x + out.reshape(x.shape)
        return x if batch.logits_rows is None else x[batch.logits_rows]

    def mixed(self, x: Tensor, num_keys: int | None = None) -> Tensor:
        heads = x.view(-1, HEADS, HEAD_DIM)
        return x + attend(heads, heads, heads, scale=1.0).reshape(x.shape)


def reference_ops() -> OpTable:
    return bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})


class InlineExecutor(Executor):
    """Runs a worker in a thread of its own, one call after the other."""

    def start(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.worker = self._pool.submit(self.worker_factory).result()

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        if not isinstance(method, str):
            return [self._pool.submit(method, self.worker, *args).result(30)]
        return [self._pool.submit(getattr(self.worker, method), *args).result(30)]

    def submit(self, step: ScheduledStep) -> Future[StepResult]:
        return self._pool.submit(self._execute, step)

    def _execute(self, step: ScheduledStep) -> StepResult:
        result: StepResult = self.worker.execute(step)
        result.finish()
        return result

    @property
    def failure(self) -> BaseException | None:
        return None

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def pooling_info(causal: bool, **changes: Any) -> PoolingInfo:
    values: dict[str, Any] = {
        "tasks": TASKS,
        "pooling_type": "LAST" if causal else "MEAN",
        "causal": causal,
        "embedding_size": HIDDEN,
        "scoring": "cosine",
        "matryoshka": (),
        **changes,
    }
    return PoolingInfo(**values)


@dataclasses.dataclass
class Setting:
    """What an engine is made of."""

    causal: bool = False
    max_model_len: int = 64
    max_num_batched_tokens: int = 96
    max_num_seqs: int = 16
    num_blocks: int | None = None
    prefix_caching: bool = True
    poison: int | None = None
    capture: Capture | None = None
    served: dict[str, Any] = dataclasses.field(default_factory=dict)
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    scheduler: dict[str, Any] = dataclasses.field(default_factory=dict)

    def model(self) -> Bidirectional:
        info = pooling_info(self.causal, **self.info)
        return (Causal if self.causal else Bidirectional)(info, self.poison)

    def config(self) -> EngineConfig:
        return EngineConfig(
            cache=CacheConfig(
                block_size=BLOCK,
                enable_prefix_caching=self.prefix_caching,
                kv_cache_memory_bytes=1 << 20 if self.num_blocks is None else None,
                num_gpu_blocks_override=self.num_blocks,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                enable_chunked_prefill=self.causal,
                async_scheduling=True,
                **self.scheduler,
            ),
        )

    def served_model(self, info: PoolingInfo) -> ServedModel:
        values: dict[str, Any] = {
            "architecture": "StubModel",
            "vocab_size": VOCAB,
            "eos_token_ids": (),
            "max_model_len": self.max_model_len,
            "tasks": info.tasks,
            "runner": "pooling",
            "pooling": info,
            **self.served,
        }
        return fake_served_model(**values)


class Made:
    """A model, and what an engine over it needs."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = setting.model()
        self.config = setting.config()
        self.core: EngineCore | None = None
        served = setting.served_model(self.model.info)
        self.input_processor = InputProcessor(Tokens(), served)  # type: ignore[arg-type]
        self.client = InprocClient(self._build)

    def _build(self, timeline: StartupTimeline) -> EngineCore:
        setting = self.setting
        self.core = EngineCore.build(
            self.config,
            max_model_len=setting.max_model_len,
            executor=InlineExecutor(self._worker),
            timeline=timeline,
        )
        self.model.steps.clear()
        self.model.pooler.batches.clear()
        return self.core

    def _worker(self) -> ModelWorker:
        setting = self.setting
        return ModelWorker(
            WorkerSettings(
                build_model=lambda: self.model,  # type: ignore[arg-type, return-value]
                ops=reference_ops(),
                device="cpu",
                dtype="float32",
                limits=WorkerLimits(
                    vocab_size=VOCAB,
                    max_model_len=setting.max_model_len,
                    max_num_batched_tokens=setting.max_num_batched_tokens,
                    max_num_seqs=setting.max_num_seqs,
                ),
                pooling=self.model.info,
                capture=setting.capture,
            )
        )

    def offline(self) -> OfflineEngine:
        return OfflineEngine(self.client, self.input_processor)

    def engine(self, **options: Any) -> Engine:
        return Engine(self.client, self.input_processor, self.config, **options)


def make(**settings: Any) -> Made:
    """See :class:`Setting`."""
    return Made(Setting(**settings))
