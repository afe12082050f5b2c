"""Contracts between a model and the engine: its interfaces, and what it may ask for while it is built.

A model family is one file that exports classes with a constructor ``(context, prefix="")`` and the
members of :class:`CausalLM`. What else it can do it says by having a capability protocol's members
(:class:`SupportsPooling`, :class:`SupportsMultiModal`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    runtime_checkable,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.attention import (
        AttentionBackend,
        AttentionLayerSpec,
        AttentionNeed,
        EncoderBackend,
        KVScaleMeasure,
    )
    from headrace_core.batch import ForwardBatch
    from headrace_core.kv import KVCacheSpec, RecurrentSpec
    from headrace_core.linear import QuantMethod
    from headrace_core.multimodal import MediaInput
    from headrace_core.ops import OpTable
    from headrace_core.parallel import Communicator
    from headrace_core.pooling import PoolingInfo, PoolingParams


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A checkpoint as resolved from its files, before a weight is read. Plain data, no torch."""

    name: str
    """Model as the user typed it."""
    path: Path
    """Local folder of the checkpoint."""
    architecture: str
    """Entry of ``config.json``'s ``architectures`` that is served."""
    config: Mapping[str, Any]
    """``config.json`` (its text part) with the user's overrides merged in."""
    generation_config: Mapping[str, Any]
    """``generation_config.json``, empty if there is none."""
    dtype: str
    """Activations' dtype, resolved from ``auto``."""
    max_model_len: int
    """Longest context, resolved."""
    vocab_size: int
    """Width of the logits."""
    eos_token_ids: tuple[int, ...]
    tasks: tuple[str, ...] = ("generate",)
    """Tasks: ``generate``, ``transcription``, ``align``, ``embed``, ``classify``, ``score``, ..."""
    weight_bytes: int = 0
    """Size of the checkpoint's tensors on disk."""
    source: str = "native"
    """Where the implementation comes from: ``native``, ``plugin:<distribution>``, or ``transformers``
    (the library's code, or the checkpoint's own, over headrace's cache)."""
    runner: str = "generate"
    """``generate`` or ``pooling``."""
    convert: str = "none"
    """Conversion of a class that does not pool by itself: ``none``, ``embed`` or ``classify``."""
    pooling: PoolingInfo | None = None
    """With runner ``pooling``."""
    is_encoder_decoder: bool = False
    processor: str = ""
    """Entry of ``headrace.multimodal_processors`` that prepares the model's media; "": it takes none."""
    has_towers: bool = True
    """False: its media come as vectors only; towers are not read."""
    whole_config: Mapping[str, Any] = field(default_factory=dict)
    """``config.json`` with the user's overrides, nested parts included."""
    trust_remote_code: bool = False
    """The user lets Python code of the checkpoint run."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Everything that a model needs while it is built; nothing of it is global."""

    config: Mapping[str, Any]
    """See :attr:`ModelInfo.config`."""
    dtype: str
    device: str
    ops: OpTable
    quant: QuantMethod
    communicator: Communicator
    attention: Callable[[AttentionNeed], AttentionBackend]
    """Chooses a backend for a layer's need; equal needs get the same object."""
    encoder_attention: Callable[[AttentionNeed], EncoderBackend]
    """The same for attention that caches nothing."""
    block_size: int
    kv_cache_dtype: str
    """``auto`` = the activations' dtype."""
    max_model_len: int
    pooling: PoolingInfo | None = None
    """See :attr:`ModelInfo.pooling`."""
    path: Path | None = None
    """The checkpoint's folder, for what is in further files of it (Dense modules)."""
    whole_config: Mapping[str, Any] = field(default_factory=dict)
    """See :attr:`ModelInfo.whole_config`."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """See :attr:`ModelInfo.generation_config`."""
    trust_remote_code: bool = False
    """See :attr:`ModelInfo.trust_remote_code`."""
    adapters: Any = None
    """The ``headrace_models.lora.Adapters`` in which linear layers get places for low-rank adapters; it is
    also the worker's :class:`headrace_core.lora.AdapterSlots`. None: the model takes none."""
    experts: Any = None
    """The ``headrace_models.layers.moe.division.ExpertDivision`` that gives ranks whole experts of mixtures.
    None: each expert is divided by its inner columns."""
    stage: Any = None
    """The ``headrace_models.stages.stage.Stage`` whose layers are built; None: all are."""


class AttentionLayer(Protocol):
    """One attention layer of a built model that reads a cache, as the runner sees it."""

    spec: AttentionLayerSpec
    kv_spec: KVCacheSpec | None
    """None if the layer caches nothing."""
    backend: AttentionBackend

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """Take the cache tensor of the layer and the index of its cache group."""


class StateLayer(Protocol):
    """One recurrent layer of a built model, as the runner sees it."""

    name: str
    kv_spec: RecurrentSpec

    def bind_states(self, states: Sequence[Tensor] | None, group: int) -> None:
        """Take the layer's states, one tensor [N, *shape] of N blocks for each of
        ``kv_spec.states``, and the index of its cache group. None: memory is profiled, nothing is
        read or kept. Blocks may lie apart: dimension 0 has any stride, the others are dense."""


@runtime_checkable
class SupportsRecurrence(Protocol):
    """Some of the model's layers keep a state instead of tokens."""

    def state_layers(self) -> Mapping[str, StateLayer]:
        """By full name, in execution order; :meth:`CausalLM.attention_layers` has the others."""


@runtime_checkable
class RunsParts(Protocol):
    """A model of which other stages have layers: its part of a pass ends on its way to the next stage."""

    ends_pass: bool
    """True of the last stage: it hands on the rows that ``forward`` gives, others all rows."""

    def run_part(self, batch: ForwardBatch) -> Tensor:
        """This stage's part of a pass, which may be recorded: what stages tell each other about the shapes
        of tensors, they have told in an earlier pass. All stages run it, or all run ``forward``.

        Returns:
            A part of what it hands on: [R, H] of the last stage, [T, H] of others.
        """


@runtime_checkable
class LaunchesPasses(Protocol):
    """The first stage's :class:`RunsParts`: one pass may begin while others are on later stages."""

    def launch(self, batch: ForwardBatch) -> Future[Callable[[], Tensor]]:
        """Begin a pass; what comes, called, gives what ``forward`` does. They come in order."""

    def expect(self, num_rows: int) -> Future[Callable[[], Tensor]]:
        """What comes of a pass that ``run_part`` has begun here, and that gives so many rows."""


@runtime_checkable
class MeasuresKVScales(Protocol):
    """An :class:`AttentionLayer` whose one-byte cache can get scales that suit the model.

    ``cache.calculate_kv_scales`` needs it of every layer that caches in one byte.
    """

    def measure_kv_scales(self, measure: KVScaleMeasure | None) -> None:
        """While ``measure`` is set (None: not any more), replace ``spec`` by what it returns.

        Each call of the layer hands it what would be stored before anything is, then stores and
        attends with the scales of the new ``spec``: later layers see what they see in service.
        """


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Where a checkpoint's tensor goes: weight mapping as data.

    ``{}`` in both names stands for the same run of characters without a dot, left to right.
    """

    source: str
    """Name in the checkpoint (``model.layers.{}.self_attn.q_proj``); suffixes such as
    ``.weight`` or ``.bias`` follow unchanged."""
    target: str
    """Name in the model (``layers.{}.attention.qkv``)."""
    part: int = 0
    """Index of this part of a fused target."""
    split: tuple[int, ...] | None = None
    """The checkpoint holds several parts in one tensor: their sizes along dimension 0; () = all
    parts of the target, in the target's own sizes. None: the tensor is one part."""
    transposed: bool = False
    """The checkpoint stores [in, out] (GPT-2's Conv1D)."""
    order: tuple[int, ...] = ()
    """With ``split``: the target's parts that the checkpoint's tensor holds, in its order ((1, 0): up
    before gate; (1, 2): no query); () = all in the target's own."""
    groups: int = 1
    """With ``split``: the tensor is so many equal groups, each with its share of every part;
    :data:`EACH_KV_HEAD`: query heads, their key and their value follow each other (GPT-NeoX, Falcon)."""
    interleaved: bool = False
    """With ``split``: the parts, of equal size, alternate row by row (gpt-oss's gate and up)."""
    stacked: bool = False
    """The checkpoint holds many targets in one tensor, along a leading dimension or as equal runs of its
    first: those that ``target``'s last ``{}``, which ``source`` lacks, counts from 0 (experts). What else
    the rule says is of each."""


EACH_KV_HEAD = 0
"""``WeightRule.groups`` of a tensor with one group for each key-value head, or, if it holds no keys, for
each head."""


class CausalLM(Protocol):
    """A text-generating model. Holds its weights; holds no request state."""

    weight_rules: ClassVar[Sequence[WeightRule]]

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        """By full name, in execution order."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states [R, H] of ``batch.logits_rows`` (all T rows if that is None)."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> logits [R, V] (soft-capped if the model does that).

        float32 or the activations' dtype: who samples reads any.
        """


@runtime_checkable
class DividesVocabulary(Protocol):
    """The model has tables of tokens whose rows are on several ranks."""

    vocabulary_passes: Sequence[str]
    """Names of methods in which ranks therefore exchange tensors, so that every rank must run them:
    ``token_vectors`` (ids [T] int64 -> [T, H]), ``compute_logits``."""


@runtime_checkable
class IgnoresWeights(Protocol):
    """The model's checkpoints hold tensors that it does not use: heads of another task."""

    ignored_weights: ClassVar[Mapping[str, str]]
    """Pattern of a tensor's whole name -> why it is passed over."""


@runtime_checkable
class TranslatesWeights(Protocol):
    """The model's checkpoints have names, or a division into tensors, that no weight rules express."""

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """The checkpoint's tensors (name, tensor, file) as the model's rules know them; what it knows
        nothing of unchanged, for the loader to complain of.

        Raises: WeightsError naming file and tensor.
        """


Rows = Literal["last", "first", "all"]
"""Rows of a prompt's hidden states that pooling needs."""


@dataclass(frozen=True, slots=True)
class PoolingBatch:
    """Prompts that are complete, as a pooler gets them. Letters: R rows, B prompts, H hidden size."""

    hidden: Tensor
    """[R, H]; prompt after prompt: all rows of a prompt, or the one that is needed."""
    cu_rows: Tensor
    """[B + 1] int64, on the CPU; running sum of rows, starts at 0."""
    params: Sequence[PoolingParams]
    """[B]; verified."""
    token_ids: Sequence[Sequence[int]]
    """[B]; whole prompts."""


class Pooler(Protocol):
    """Turns final hidden states into results. Source of truth for what a model can do."""

    tasks: Sequence[str]
    """Tasks of :data:`headrace_core.pooling.POOLING_TASKS`."""

    def rows(self, params: PoolingParams) -> Rows:
        """Rows that a request needs."""

    def __call__(self, batch: PoolingBatch) -> Sequence[Tensor]:
        """One float32 result for each prompt: [size], or [tokens, size] for tasks on tokens.

        A prompt's result does not depend on the others.
        """


@runtime_checkable
class SupportsPooling(Protocol):
    """The model turns hidden states into vectors or scores.

    ``forward`` gives final hidden states; with ``logits_rows`` None, of all tokens.
    """

    pooler: Pooler

    def attention_layers(self) -> Mapping[str, AttentionLayer]: ...
    def forward(self, batch: ForwardBatch) -> Tensor: ...


@runtime_checkable
class SupportsMultiModal(Protocol):
    """The model takes media embeddings in place of placeholder tokens."""

    modalities: ClassVar[Sequence[str]]

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """One tensor [``num_vectors``, W] per item, the activations' dtype; W: :attr:`InputEmbeds.values`."""


MROPE_POSITIONS = "mrope_positions"
"""Key of :attr:`ForwardBatch.extra`: [3, T] int64, the tokens' places in time, height and width. Absent:
``batch.positions`` are their places on all three."""


@runtime_checkable
class SupportsMRoPE(Protocol):
    """Tokens of media stand in time, height and width (Wang et al. 2024, arXiv:2409.12191)."""

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """[3, num_tokens] int64, on the CPU: the places of a prompt's tokens. What follows them stands one
        behind the last of them, and so on, on all axes."""


INPUT_EMBEDS = "input_embeds"
"""Key of :attr:`ForwardBatch.extra`: an :class:`InputEmbeds`."""


class InputEmbeds(NamedTuple):
    """Tokens of a batch that are given as vectors; their ids mean nothing."""

    rows: Tensor
    """[n] int64; rows of the flat batch."""
    values: Tensor
    """[n, W], the activations' dtype: what the table of input embeddings would give, scaled if the model
    does that, positions not yet added; W > H if :meth:`SupportsMultiModal.embed_media` adds to it."""


@runtime_checkable
class SupportsPromptEmbeds(Protocol):
    """The model takes :class:`InputEmbeds` in place of token ids."""

    def input_vectors(self, batch: ForwardBatch) -> Tensor:
        """[T, H]; the tokens' embeddings, and the given ones in the rows that have them."""


class GuidesSampling(Protocol):
    """A model class whose outputs follow rules of its own (which tokens may follow which)."""

    logits_processors: ClassVar[Sequence[str]]
    """Logits processors, as ``module:Class``, that every engine with this model runs."""


@runtime_checkable
class SupportsEncoderDecoder(Protocol):
    """The model's decoder attends to what its encoder makes of media.

    Cross-attention layers have a :class:`~headrace_core.kv.CrossAttentionSpec`: their keys and values
    are written once, in the step that encodes, and read until the request ends.
    """

    def encode(self, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The encoder on the media of requests that begin in this step, one mapping each.

        Returns:
            [E, H]: their encoder states, one after the other, each as long as its
            ``num_encoder_tokens``; the runner gives them to ``forward`` as ``batch.encoder_states``.
        """


@runtime_checkable
class SupportsAlignment(Protocol):
    """A :class:`SupportsEncoderDecoder` that tells which part of its media each token comes from.

    Where the checkpoint can, :attr:`ModelInfo.tasks` holds ``align``.
    """

    def align(self, batch: ForwardBatch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Attention weights from each token to each encoder state: a ``forward`` that keeps weights.

        Args:
            batch: one request's whole sequence, its ``encoder_states`` included; never captured.
            inputs: the request's media as ``encode`` got it (which says how much of it is padding).

        Returns:
            [T, F] float32; row t belongs to token t of the sequence, column f to encoder state f. The
            mean over the heads that align, ready for dynamic time warping; states of padding may be
            left out.
        """


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a long piece of start-up work, for whoever shows it."""

    phase: str
    done: int
    total: int
    unit: str = "B"
    detail: str = ""


ProgressCallback = Callable[[LoadProgress], None]


def ignore_progress(_: LoadProgress) -> None:
    """A callback that shows nothing."""


class WeightFormat(Protocol):
    """A checkpoint format.

    The object behind an entry point of ``headrace.weight_formats`` is a callable that makes one:
    ``(load: LoadConfig) -> WeightFormat``.
    """

    name: str

    def recognises(self, path: Path) -> bool:
        """True if the folder or file holds a checkpoint of this format. Cheap."""

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """Every tensor once: name, tensor (memory-mapped where possible), file it came from."""


@runtime_checkable
class SharesByRank(WeightFormat, Protocol):
    """A format of tensors as one rank's model holds them: fused, cut, and named by the
    model's own layers. Its ``tensors`` yields those of rank 0 of 1."""

    def rank_tensors(
        self,
        path: Path,
        rank: int,
        world_size: int,
        progress: ProgressCallback = ignore_progress,
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """Every tensor of a rank once: ``path of the layer.name``, tensor, file.

        Raises:
            WeightsError: the files are for another number of ranks.
        """
