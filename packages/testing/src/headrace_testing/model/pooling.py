"""The tests that a pooling model inherits: equality with Hugging Face transformers on tiny models.

Inherit from :class:`PoolingConformance`, say which transformers class is the reference and how a
checkpoint is resolved and loaded, and keep the tests. Needs torch, transformers and safetensors.
"""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import WeightsError
from headrace_core.model import BuildContext, ModelInfo, PoolingBatch, SupportsPooling
from headrace_core.ops import OpTable
from headrace_core.parallel import Communicator
from headrace_core.pooling import PoolingParams
from headrace_testing.model.decoders import (
    Checkpoint,
    PagedDriver,
    build_context,
    randomise,
    run_ranks,
)
from headrace_testing.sampling import turns

LENGTHS = (9, 1, 30, 17, 2)
"""Lengths of the prompts of a batch."""


def flat_batch(
    prompts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
) -> ForwardBatch:
    """Whole prompts, one after the other, for a model without a cache.

    Args:
        segments: of each prompt's tokens; None: the model has none.
    """
    lengths = torch.tensor([0, *map(len, prompts)], dtype=torch.int32)
    flat = None if segments is None else torch.tensor([s for one in segments for s in one])
    return ForwardBatch(
        input_ids=torch.tensor([token for prompt in prompts for token in prompt]),
        positions=torch.cat([torch.arange(len(prompt)) for prompt in prompts]),
        cu_seqlens_q=lengths.cumsum(0).int(),
        seq_lens=lengths[1:],
        max_seqlen_q=int(lengths.max()),
        max_seqlen_k=int(lengths.max()),
        groups=(),
        token_type_ids=flat,
    )


def pooling_batch(
    model: SupportsPooling,
    hidden: Sequence[Tensor],
    params: Sequence[PoolingParams],
    prompts: Sequence[Sequence[int]],
) -> PoolingBatch:
    """Hidden states by prompt, cut to the rows that the pooler wants."""
    cut = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}
    rows = [states[cut[model.pooler.rows(one)]] for states, one in zip(hidden, params)]
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return PoolingBatch(torch.cat(rows), bounds, params, prompts)


def one_row(states: Tensor, kind: str) -> Tensor:
    """states [n, H] -> [H], by pooling type."""
    return {"MEAN": states.mean(0), "CLS": states[0], "LAST": states[-1]}[kind]


@turns(3)
class PoolingConformance(ABC):
    """Inherit, fill in the four methods below, and keep the tests.

    The config should be tiny and odd: windows shorter than the longest of :data:`LENGTHS`, sizes that
    are no powers of two, three labels.
    """

    makes: ClassVar[Literal["vectors", "labels", "token labels"]] = "vectors"
    """``vectors``: the reference gives ``last_hidden_state``; else ``logits``."""
    tolerance: ClassVar[float] = 2e-5
    """Largest difference of hidden states, relative to their size, and of results in float32."""
    max_model_len: ClassVar[int | None] = 64
    segments: ClassVar[bool] = False
    """True if the model tells segments apart."""
    causal: ClassVar[bool] = False
    tensor_parallel: ClassVar[int] = 2
    """Ranks of the tensor-parallel test; 1 skips it."""
    prefix: ClassVar[str] = ""
    """Prefix of the encoder's names within a model with a head: checkpoints with and without it load."""
    default_pooling: ClassVar[str] = "CLS"
    a_matrix: ClassVar[str] = ".1."
    """Part of the name of a matrix that the model needs."""

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
    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> Any:
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

    def open(self, path: Path, *, ops: OpTable | None = None, **settings: Any) -> Any:
        settings = {"max_model_len": self.max_model_len, "runner": "pooling", **settings}
        info = self.resolve(path, **settings)
        return self.load(info, build_context(info, ops=ops))

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        chooser = random.Random(seed)
        return [chooser.randrange(3, int(self.hf_config().vocab_size)) for _ in range(length)]

    def prompts(self) -> list[list[int]]:
        return [self.prompt(length, seed) for seed, length in enumerate(LENGTHS)]

    def segment_ids(self, prompts: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """The second half of each prompt is its second text."""
        if not self.segments:
            return None
        return [[int(2 * i >= len(p) and len(p) > 1) for i in range(len(p))] for p in prompts]

    def expected(
        self, checkpoint: Checkpoint, prompt: Sequence[int], num_keys: int | None = None
    ) -> Tensor:
        """Result of transformers for a prompt: hidden states [n, H], or logits.

        Args:
            num_keys: so many of its first tokens are attended to; None: all.
        """
        extra = {}
        if num_keys is not None:
            extra["attention_mask"] = (torch.arange(len(prompt)) < num_keys).long()[None]
        segments = self.segment_ids([prompt])
        if segments is not None:
            extra["token_type_ids"] = torch.tensor(segments)
        with torch.inference_mode():
            out = checkpoint.reference(torch.tensor([list(prompt)]), **extra)
        result: Tensor = out.last_hidden_state[0] if self.makes == "vectors" else out.logits[0]
        return result

    def hidden(self, model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Final hidden states [n, H] of each prompt, computed in one step."""
        if model.attention_layers():
            batch = PagedDriver(model).batch({str(i): p for i, p in enumerate(prompts)})
        else:
            batch = flat_batch(prompts, self.segment_ids(prompts))
        with torch.inference_mode():
            return list(model.forward(batch).split([len(prompt) for prompt in prompts]))

    def pooled(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        params: Sequence[PoolingParams],
    ) -> Sequence[Tensor]:
        """Results for these requests, which are computed together."""
        batch = pooling_batch(model, self.hidden(model, prompts), params, prompts)
        with torch.inference_mode():
            results: Sequence[Tensor] = model.pooler(batch)
        assert all(result.dtype is torch.float32 for result in results)
        return results

    def assert_close(self, actual: Tensor, expected: Tensor) -> None:
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            actual.float(), expected, atol=self.tolerance * size, rtol=0, check_stride=False
        )

    def params(self, task: str | None = None, **fields: Any) -> PoolingParams:
        """The parameters of a request, as input processing fills them in."""
        default = {"vectors": "embed", "labels": "classify", "token labels": "token_classify"}
        return PoolingParams(**{"normalize": None, **fields, "task": task or default[self.makes]})

    # ---- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
        return cls().make_checkpoint(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, checkpoint: Checkpoint) -> Any:
        return cls().open(checkpoint.path)

    # ---- what it is

    def test_supports_pooling(self, checkpoint: Checkpoint, model: Any) -> None:
        assert isinstance(model, SupportsPooling)
        info = self.resolve(checkpoint.path, runner="pooling")
        assert info.pooling is not None
        assert tuple(model.pooler.tasks) == info.pooling.tasks == info.tasks
        assert info.pooling.causal is self.causal
        assert info.pooling.token_types is self.segments
        assert bool(model.attention_layers()) is self.causal

    def test_reference_is_not_flat(self, checkpoint: Checkpoint) -> None:
        """If every token gave the same, the tests below would prove nothing."""
        outputs = [self.expected(checkpoint, prompt).flatten()[:3] for prompt in self.prompts()]
        assert float(torch.stack([x.float().mean() for x in outputs]).std()) > 1e-2

    # ---- numbers

    @turns(1)
    def test_results_of_a_ragged_batch(self, checkpoint: Checkpoint, model: Any) -> None:
        prompts = self.prompts()
        if self.makes == "vectors":
            for states, prompt in zip(self.hidden(model, prompts), prompts):
                self.assert_close(states, self.expected(checkpoint, prompt))
            return
        results = self.pooled(model, prompts, [self.params(use_activation=False)] * len(prompts))
        for logits, prompt in zip(results, prompts):
            self.assert_close(logits, self.expected(checkpoint, prompt))

    def test_tokens_that_nothing_attends_to(self, checkpoint: Checkpoint, model: Any) -> None:
        """As the fillers of ColBERT's queries are: they attend to the others, and keep their places."""
        if self.makes != "vectors" or self.causal:
            pytest.skip("it has no attention in both directions, or no vectors for its tokens")
        prompts, num_keys = [self.prompt(n, n) for n in (12, 9, 7)], [9, 9, 4]
        batch = dataclasses.replace(
            flat_batch(prompts, self.segment_ids(prompts)),
            key_lens=torch.tensor(num_keys, dtype=torch.int32),
        )
        with torch.inference_mode():
            hidden = model.forward(batch).split([len(prompt) for prompt in prompts])
        for states, prompt, n in zip(hidden, prompts, num_keys):
            self.assert_close(states, self.expected(checkpoint, prompt, n))
        with pytest.raises(AssertionError):
            self.assert_close(hidden[0], self.expected(checkpoint, prompts[0]))

    def test_a_batch_equals_its_prompts_alone(self, model: Any) -> None:
        prompts = self.prompts()
        one = self.params(normalize=True) if self.makes == "vectors" else self.params()
        together = self.pooled(model, prompts, [one] * len(prompts))
        for result, prompt in zip(together, prompts):
            self.assert_close(result, self.pooled(model, [prompt], [one])[0])

    def test_the_order_of_prompts_does_not_matter(self, model: Any) -> None:
        prompts = self.prompts()
        one = self.params()
        forth = self.pooled(model, prompts, [one] * len(prompts))
        back = self.pooled(model, prompts[::-1], [one] * len(prompts))
        for result, other in zip(forth, back[::-1]):
            self.assert_close(result, other)

    @pytest.mark.parametrize("kind", ["MEAN", "CLS", "LAST"])
    def test_pooling_types(self, checkpoint: Checkpoint, kind: str) -> None:
        if self.makes != "vectors":
            pytest.skip("a classifier pools in its own way")
        model, prompts = (
            self.open(checkpoint.path, pooler_config={"pooling_type": kind}),
            self.prompts(),
        )
        wanted = [self.params(normalize=True), *[self.params(normalize=False)] * 4]
        for index, result in enumerate(self.pooled(model, prompts, wanted)):
            states = self.expected(checkpoint, prompts[index])
            vector = one_row(states, kind)
            if index == 0:
                vector = vector / vector.norm()
            self.assert_close(result, vector)

    def test_default_pooling(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path, runner="pooling")
        assert info.pooling is not None
        assert info.pooling.pooling_type == self.default_pooling

    def test_vectors_of_tokens_among_others(self, checkpoint: Checkpoint, model: Any) -> None:
        """Tasks, sizes and norms may differ from request to request of one step."""
        if self.makes != "vectors":
            pytest.skip("it makes no vectors")
        prompts = self.prompts()
        wanted = [
            self.params("token_embed", normalize=True),
            self.params(normalize=True, dimensions=5),
            self.params("token_embed", normalize=True, dimensions=7),
            self.params(normalize=False),
            self.params(normalize=True, dimensions=5),
        ]
        results = self.pooled(model, prompts, wanted)
        for prompt, params, result in zip(prompts, wanted, results):
            states = self.expected(checkpoint, prompt)[:, : params.dimensions]
            if params.task == "embed":
                states = one_row(states, self.default_pooling)
            if params.normalize:
                states = states / states.norm(dim=-1, keepdim=True)
            self.assert_close(result, states)

    def test_probabilities(self, checkpoint: Checkpoint, model: Any) -> None:
        if self.makes == "vectors":
            pytest.skip("it has no labels")
        prompts = self.prompts()
        results = self.pooled(model, prompts, [self.params(use_activation=True)] * len(prompts))
        for result, prompt in zip(results, prompts):
            logits = self.expected(checkpoint, prompt)
            self.assert_close(result, torch.softmax(logits, dim=-1))

    def test_one_label_scores(self, tmp_path: Path) -> None:
        if self.makes != "labels":
            pytest.skip("it has no label for a prompt")
        checkpoint = self.make_checkpoint(tmp_path, num_labels=1)
        info = self.resolve(tmp_path, runner="pooling")
        assert info.pooling is not None
        assert "score" in info.tasks
        assert info.pooling.scoring == "cross"
        prompts = self.prompts()
        wanted = [self.params("score", use_activation=True)] * len(prompts)
        results = self.pooled(self.open(tmp_path), prompts, wanted)
        for result, prompt in zip(results, prompts):
            assert result.shape == (1,)
            self.assert_close(result, torch.sigmoid(self.expected(checkpoint, prompt)))

    def test_bias_comes_off_the_logits(self, checkpoint: Checkpoint) -> None:
        if self.makes == "vectors":
            pytest.skip("it has no labels")
        model = self.open(checkpoint.path, pooler_config={"logit_bias": 0.7})
        prompt = self.prompt(9)
        result = self.pooled(model, [prompt], [self.params(use_activation=False)])[0]
        self.assert_close(result, self.expected(checkpoint, prompt) - 0.7)

    def test_bfloat16(self, checkpoint: Checkpoint) -> None:
        prompts = self.prompts()
        model = self.open(checkpoint.path, dtype="bfloat16")
        one = self.params(use_activation=False) if self.makes != "vectors" else self.params()
        for result, prompt in zip(self.pooled(model, prompts, [one] * len(prompts)), prompts):
            expected = self.expected(checkpoint, prompt)
            if self.makes == "vectors":
                expected = one_row(expected, self.default_pooling)
            cosine = torch.cosine_similarity(result, expected, dim=-1)
            assert float(cosine.min()) > 0.97

    def test_chosen_rows_equal_all_rows(self, model: Any) -> None:
        prompt = self.prompt(17)
        whole = self.hidden(model, [prompt])[0]
        batch = (
            PagedDriver(model).batch({"a": prompt}, rows=[0, 16])
            if self.causal
            else _with_rows(flat_batch([prompt], self.segment_ids([prompt])), [0, 16])
        )
        with torch.inference_mode():
            self.assert_close(model.forward(batch), whole[[0, 16]])

    def test_tensor_parallel(self, checkpoint: Checkpoint, model: Any) -> None:
        if self.tensor_parallel == 1:
            pytest.skip("the tiny config does not divide")
        prompts = self.prompts()
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len, runner="pooling")

        def work(communicator: Communicator) -> Sequence[Tensor]:
            part = self.load(info, build_context(info, communicator=communicator))
            return self.hidden(part, prompts)

        expected = self.hidden(model, prompts)
        for states in run_ranks(self.tensor_parallel, work):
            self.assert_close(torch.cat(states), torch.cat(expected))

    # ---- loading

    def test_names_without_or_with_the_prefix(
        self, checkpoint: Checkpoint, model: Any, tmp_path: Path
    ) -> None:
        if not self.prefix:
            pytest.skip("its names have one form")

        def rename(tensors: dict[str, Tensor], name: str) -> None:
            add = not name.startswith(self.prefix)
            renamed = {
                f"{self.prefix}{old}" if add else old.removeprefix(self.prefix): tensor
                for old, tensor in tensors.items()
            }
            tensors.clear()
            tensors.update(renamed)

        self._rewrite(checkpoint, tmp_path, rename)
        prompts = self.prompts()
        other = self.open(tmp_path)
        for states, expected in zip(self.hidden(other, prompts), self.hidden(model, prompts)):
            assert torch.equal(states, expected)

    def test_dummy_weights_are_deterministic(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len, runner="pooling")
        first, second = (
            self.pooled(
                self.load(info, build_context(info), load_format="dummy"),
                [self.prompt(9)],
                [self.params()],
            )[0]
            for _ in range(2)
        )
        assert bool(first.isfinite().all())
        assert torch.equal(first, second)

    def test_missing_tensor(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        name = self._rewrite(checkpoint, tmp_path, lambda tensors, name: tensors.pop(name))
        self._assert_refused(tmp_path, name.removeprefix(self.prefix))

    def test_left_over_tensor(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        def add(tensors: dict[str, Tensor], _: str) -> None:
            tensors["encoder.extra_adapter.weight"] = torch.zeros(3)

        self._rewrite(checkpoint, tmp_path, add)
        self._assert_refused(tmp_path, "encoder.extra_adapter.weight", "model.safetensors")

    def _rewrite(
        self, checkpoint: Checkpoint, folder: Path, change: Callable[[dict[str, Tensor], str], Any]
    ) -> str:
        """Copy a checkpoint with its tensors changed; returns the name of one that is needed."""
        from safetensors.torch import load_file, save_file

        for file in checkpoint.path.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(checkpoint.path / "model.safetensors")
        name = min(n for n, x in tensors.items() if x.dim() == 2 and self.a_matrix in n)
        change(tensors, name)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return name

    def _assert_refused(self, folder: Path, *words: str) -> None:
        with pytest.raises(WeightsError) as caught:
            self.open(folder)
        for word in words:
            assert word in str(caught.value), word


def _with_rows(batch: ForwardBatch, rows: Sequence[int]) -> ForwardBatch:
    values: Mapping[str, Any] = {n: getattr(batch, n) for n in batch.__dataclass_fields__}
    return ForwardBatch(**{**values, "logits_rows": torch.tensor(list(rows))})
