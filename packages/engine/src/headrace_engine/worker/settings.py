"""Everything that a worker is told when it is made: one object, in parts by idea.

A feature that needs something new adds a field to the part it belongs to, or a part; nothing that passes the
object on changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headrace_core.kv import KVCacheConfig
from headrace_core.model import AttentionLayer
from headrace_engine.config import ProfilerConfig
from headrace_engine.cores import CpuThreads
from headrace_engine.kv_transfer.parts import GroupParts, parts_of_groups
from headrace_engine.speculation.config import SpeculativeConfig

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from headrace_core.graph import StepGraph
    from headrace_core.kv import KVConnector
    from headrace_core.lora import AdapterSlots
    from headrace_core.model import CausalLM
    from headrace_core.ops import OpTable
    from headrace_core.pooling import PoolingInfo
    from headrace_core.sampling.logits_processor import LogitsProcessor
    from headrace_engine.encoder.slices import EncoderSlices
    from headrace_engine.encoder.transfer import EncoderTransfer
    from headrace_engine.execution.capture import Capture
    from headrace_engine.execution.measuring.kept_costs import KeptCosts
    from headrace_engine.execution.measuring.largest import LargestItem
    from headrace_engine.execution.scale_constants import ScaleConstants
    from headrace_engine.lora.store import AdapterStore
    from headrace_engine.sleep.memory_pool import MemoryPool
    from headrace_engine.speculation.draft_head import BuildHead
    from headrace_engine.structured.store import GrammarStore
    from headrace_engine.weights.beside import BuildBeside
    from headrace_engine.weights.holder import WeightHolder


class LeadsPasses(Protocol):
    """Makes passes of rank 0 run on every rank."""

    def lead(self, model: Any) -> None:
        """Those of a model or of its experts, from now on."""
        ...

    def expect(self) -> None:
        """A pass is about to come."""
        ...

    def lead_replays(self, graph: StepGraph | None) -> None:
        """Those that are recorded."""
        ...

    def lead_adapters(self, slots: AdapterSlots) -> AdapterSlots:
        """Slots that tell the other ranks what they are told."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """None, while this lasts."""
        ...

    def call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        """Call a method of the other ranks' workers, after the passes until now; results by rank from 1."""
        ...


DividesBlocks = Callable[[Mapping[str, AttentionLayer], KVCacheConfig], Sequence[GroupParts]]
"""Says for layers of a rank and their cache which parts of blocks it has, by cache group."""


class WatchesSteps(Protocol):
    """Does something between steps."""

    def begin(self) -> None:
        """The next step is the first with requests."""
        ...

    def after_step(self) -> None:
        """A step of requests has run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """The largest of everything in one step."""

    vocab_size: int
    """Width of the logits."""
    max_model_len: int
    """Longest context, in tokens."""
    max_num_batched_tokens: int
    """Most tokens in one step."""
    max_num_seqs: int
    """Most requests in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen and described."""

    logprobs_mode: str = "raw_logprobs"
    """See :class:`~headrace_engine.sampling.sampler.Sampler`."""
    seed: int = 0
    """Of requests that bring none."""
    grammars: GrammarStore | None = None
    """Those of structured output; None: a request that needs one fails."""
    make_processors: Callable[[torch.device], Sequence[LogitsProcessor]] | None = None
    """Makes the logits processors for the device; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """What requests bring besides text, and where towers compute."""

    largest: Callable[[], Sequence[LargestItem]] | None = None
    """Makes an item of each kind to measure with; None: requests bring none."""
    max_vectors: int = 0
    """Vectors of media that are kept for items that come again."""
    make_transfer: Callable[[], EncoderTransfer] | None = None
    """Makes the worker's end of a disaggregated encoder; None: there is none."""
    slices: EncoderSlices | None = None
    """Where towers pause; None: nothing is embedded beside steps."""
    encoder_share: float = 0.0
    """Seconds of embedding beside steps for each second of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTransferSettings:
    """Blocks that are outside the cache."""

    connector: KVConnector | None = None
    """Has blocks that are outside the cache, and gets some; None: there are none."""
    divide_blocks: DividesBlocks = parts_of_groups
    """Says which parts of blocks this rank has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Who guesses tokens that steps check besides."""

    config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Names a proposer that needs no model, and how many tokens are guessed."""
    build_model: Callable[[], CausalLM] | None = None
    """Builds and loads the model that guesses; None: none does."""
    max_len: int = 0
    """The longest context of that model."""
    build_head: BuildHead | None = None
    """Builds what guesses by the model's hidden states; None: nothing does."""
    head_within: bool = False
    """The head that guesses is layers of the model's checkpoint, and comes with it."""
    reads_states: bool = False
    """Steps of rank 0 give hidden states of all rows, which something reads that guesses; for ranks that
    follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Low-rank adapters of requests."""

    make_slots: Callable[[], AdapterSlots] | None = None
    """Makes the slots of a model's adapters; None: requests have none."""
    store: AdapterStore | None = None
    """Has the adapters, and reads them for the model; None on ranks that follow, and without slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The worker's place among the ranks over which the model's layers are divided."""

    rank: int = 0
    """0 has the requests; the others follow."""
    memory_share: int = 1
    """Ranks that share the device's memory, this one included."""
    leader: LeadsPasses | None = None
    """Makes passes of the model run on the other ranks, too; None: there are none, or this rank follows."""
    leave_group: Callable[[], None] | None = None
    """Ends exchanges with the other ranks; None: there are none."""
    report_group: Callable[[], Mapping[str, str]] | None = None
    """Facts about those exchanges, as plain data."""
    experts: Any = None
    """Whole experts that move between ranks by ``arrange_experts`` if they ``may_move``, compute for other
    engines by ``take_part``, and let go of a model by ``forget``; None: there are none."""
    watcher: WatchesSteps | None = None
    """Is told of steps; None: nobody is."""
    shares_memory: bool = True
    """All ranks are on one host."""
    has_inputs: bool = True
    """False: it is on a later stage, and runs nothing of what makes inputs or logits."""


class AheadBytes(NamedTuple):
    """Weights that are in this process's memory before the model is built."""

    resident: int = 0
    reserved: int = 0
    """Of these, the bytes that do not count as free: pages of a file do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """How weights change after the start; see :class:`~headrace_engine.weights.changing.ChangingWorker`."""

    rebuild_model: Callable[..., CausalLM] | None = None
    """Does as ``build_model``, given changes of the load configuration first, and ``path`` of another
    checkpoint that serves by now; None: weights are read once."""
    build_beside: BuildBeside | None = None
    """Builds the model of another checkpoint while this one serves; None: nothing does."""
    beside_ended: Callable[[bool], None] = lambda serves: None
    """Is told when a model that was built beside serves now (True), or has been dropped (False)."""
    max_bytes: int | None = None
    """What this rank may hold in all; None: what is free."""
    holder: WeightHolder | None = None
    """What comes of new weights; knows the models that are built. None: there is no way for them."""
    packed_ahead: Callable[[], AheadBytes] = AheadBytes
    """Waits for weights of the first model that are packed before it is built."""
    memory_pool: MemoryPool | None = None
    """Holds weights and cache of an engine that may sleep, if the device has such memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """A worker's model, device and limits, and a part for each idea that not every engine uses."""

    build_model: Callable[..., CausalLM]
    """Builds and loads the model, given the slots of ``adapters.make_slots`` if there is that; called once,
    by :meth:`~headrace_engine.worker.serving.ServingWorker.load`."""
    ops: OpTable
    """Its ``sample`` and ``top_logprobs`` choose and describe tokens."""
    device: str
    """``cpu``, ``cuda`` or ``cuda:1``."""
    dtype: str
    """The activations' dtype; for messages."""
    limits: WorkerLimits
    threads: CpuThreads | None = None
    """CPU threads that torch uses in this process, and their cores, the worker's first; see
    :class:`~headrace_engine.execution.binding.ThreadBinding`. None: torch's own setting, not bound."""
    capture: Capture | None = None
    """How steps are captured; None: all run eagerly."""
    cache_ahead_bytes: int = 0
    """See :class:`~headrace_engine.execution.populate.CachePopulator`; CPU only."""
    kv_scales: ScaleConstants | None = None
    """Measure the cache's scales, with these constants; None: leave them."""
    kept_costs: KeptCosts | None = None
    """Has what an earlier start of the same measured; None: every start measures."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """What ``start_profile`` records."""
    prompt_embeds: bool = False
    """Prompts may be embeddings, which the model must support then."""
    pooling: PoolingInfo | None = None
    """What the model pools, which it must support then; None: it generates."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    media: MediaSettings = field(default_factory=MediaSettings)
    transfer: BlockTransferSettings = field(default_factory=BlockTransferSettings)
    drafts: DraftSettings = field(default_factory=DraftSettings)
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    ranks: RankSettings = field(default_factory=RankSettings)
    weights: WeightSettings = field(default_factory=WeightSettings)

    @property
    def takes_token_types(self) -> bool:
        """True if what is pooled has types of tokens."""
        return self.pooling is not None and self.pooling.token_types
