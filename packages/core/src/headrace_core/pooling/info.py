"""Tasks of pooling models, and pooling facts of a checkpoint: of its class, its files, and resolved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace_core.errors import RequestError

POOLING_TASKS = ("embed", "classify", "score", "token_embed", "token_classify", "plugin")
EMBED_TASKS = ("embed", "token_embed")
CLASSIFY_TASKS = ("classify", "score", "token_classify")
TOKEN_TASKS = ("token_embed", "token_classify")
"""Tasks whose result has a row for each token of the prompt."""
POOLING_TYPES = ("LAST", "ALL", "CLS", "STEP", "MEAN")


@dataclass(frozen=True, slots=True)
class PoolingTraits:
    """Pooling of a class by itself, before its checkpoint and the user change it.

    Whoever resolves a checkpoint needs it without importing the class. headrace's own classes are in
    a table; a class of another distribution has it as the class variable ``pooling_traits``, and is
    imported to be asked.
    """

    purpose: Literal["embed", "classify", "token_classify"]
    """Output of the class for a prompt: a vector, a row of logits, a row for each token."""
    pooling_type: str
    """Unless checkpoint or user say otherwise."""
    pooling_types: tuple[str, ...] = POOLING_TYPES
    """Pooling types that the user may choose."""
    causal: bool = False
    """See :attr:`PoolingInfo.causal`."""
    token_types: bool = False
    """The class reads segments where ``type_vocab_size`` is above 1."""
    positions_follow_padding: bool = False
    """The first position is ``pad_token_id + 1`` (RoBERTa): the table has fewer than it has rows."""
    tasks: tuple[str, ...] = ()
    """Where they are not those that follow from the purpose."""
    normalize: bool = True
    """Unless checkpoint or user say otherwise."""
    num_labels: int = 0
    """Where the config's number is not the class's; 0: the config's."""
    activation: str = ""
    """The same of :attr:`PoolingInfo.activation`."""
    step_tag_id: int | None = None
    """Token that ends a step, for classes that judge steps; the user may set another."""
    sparse: bool = False
    """See :attr:`PoolingInfo.sparse`."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer between pooling and normalisation (Sentence Transformers' ``Dense``)."""

    path: str
    """Folder of its weights below the checkpoint's: ``linear.weight`` [out, in], ``linear.bias``; "":
    they are among the model's own tensors."""
    in_features: int
    out_features: int
    bias: bool
    activation: str = "Identity"
    """Name of a class of ``torch.nn``."""


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """Text handling of a multi-vector model (ColBERT, arXiv:2004.12832): marks and lengths."""

    query_marker: str = ""
    """Token put behind the first special token of a query (``[Q]``); "": none."""
    document_marker: str = ""
    query_marker_id: int | None = None
    """Where the marker is one token of the vocabulary: a tokenizer may cut its text to pieces."""
    document_marker_id: int | None = None
    query_length: int = 32
    """Tokens of a query, with its special ones; shorter ones are filled up if ``expand_queries``."""
    document_length: int = 180
    expand_queries: bool = True
    """Fill queries up with the mask token."""
    attend_to_expansion: bool = False
    """True if the filled-up tokens are attended to; they attend to the query's own in any case."""
    skip_words: tuple[str, ...] = ()
    """Tokens of documents whose vectors are left out (punctuation)."""
    skip_ids: tuple[int, ...] = ()
    """Their ids; words that are no token are left out."""
    expansion_id: int | None = None
    """Token that queries are filled up with; None: the tokenizer's mask token."""


@dataclass(frozen=True, slots=True)
class PairChat:
    """Pairs that are scored are conversations of the roles ``query`` and ``document``, with the default
    prompt as the system's message, which the checkpoint's chat template renders."""

    content_format: str = "auto"
    """``auto``, ``string`` or ``openai``: what the template expects ``content`` to be."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the template."""


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """Everything that a checkpoint and the user say of pooling: nothing left open. Plain data."""

    tasks: tuple[str, ...]
    """Tasks of :data:`POOLING_TASKS`."""
    pooling_type: str
    causal: bool
    """True if a token sees only those before it, in all layers: then prompts may be computed in
    chunks and their beginnings reused (where the pooling type allows it)."""
    embedding_size: int = 0
    """Numbers of an uncut embedding; 0: it embeds nothing."""
    normalize: bool = True
    use_activation: bool = True
    dimensions: int | None = None
    matryoshka: tuple[int, ...] | None = None
    """Sizes to which embeddings may be cut; () = any; None = none."""
    num_labels: int = 0
    labels: tuple[str, ...] = ()
    """Name of each label, by index; () where the config has none."""
    activation: str = "softmax"
    """``identity``, ``sigmoid``, ``softmax``, or the name of a class of ``torch.nn``."""
    head_dtype: str = "float32"
    logit_bias: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    dense: tuple[DenseModule, ...] = ()
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    native_len: int = 0
    """Longest prompt that is computed in one piece: the model's positions, or fewer if the context
    is set to fewer. Longer texts are embedded in windows of so many tokens."""
    scoring: str = ""
    """Scoring of pairs: ``cross`` (both texts in one prompt), ``cosine`` (of embeddings),
    ``late_interaction`` (of token embeddings); "" = not at all."""
    score_template: str | None = None
    """Jinja template of a pair's prompt; of conversations unless scoring is ``cross``; None: it has none."""
    pair_end_id: int | None = None
    """Token behind each pair's prompt, where the model wants one that no text spells."""
    pair_chat: PairChat | None = None
    """None: pairs are two texts."""
    sparse: bool = False
    """Embeddings have an entry for each token of the vocabulary, nearly all of them 0."""
    sparse_sum: bool = False
    """A word's weight is the sum over the text's tokens, not the maximum."""
    sparse_log_twice: bool = False
    """The logarithm is taken twice."""
    late_interaction: LateInteraction | None = None
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Named texts to put before those that are embedded (Sentence Transformers' ``prompts``)."""
    default_prompt_name: str | None = None
    """The prompt of requests that name none; of :attr:`prompts`. None: then nothing is put."""
    include_prompt: bool = True
    """False: such a prompt's tokens are read, and left out of what is pooled (types CLS and MEAN)."""
    lower_case: bool = False
    """Texts are made lower-case first (Sentence Transformers' ``do_lower_case``)."""
    token_types: bool = False
    """The model tells the two texts of a pair apart by ids (BERT's segments)."""
    max_token_types: int = 2

    @property
    def chunks(self) -> bool:
        """True if a prompt may be computed in several steps."""
        return self.causal

    @property
    def reuses_prefixes(self) -> bool:
        """True if cached prefixes give the same results as computed ones."""
        return self.causal and self.pooling_type == "LAST"

    def prompt_text(self, name: str | None) -> str:
        """Prompt that the model puts before a text to embed.

        Args:
            name: of :attr:`prompts`; None: the default one, if there is any.

        Raises:
            RequestError: there is no prompt of this name; lists those there are.
        """
        if name is None:
            return self.prompts[self.default_prompt_name] if self.default_prompt_name else ""
        if not isinstance(name, str) or name not in self.prompts:
            accepted = (
                f"one of {sorted(self.prompts)}" if self.prompts
                else "left out: the checkpoint has no prompts"
            )  # fmt: skip
            raise RequestError(
                f"prompt_name = {name!r}: must be {accepted}", param="prompt_name", value=name
            )
        return self.prompts[name]
