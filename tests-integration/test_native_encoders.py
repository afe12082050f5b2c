"""Encoders with native kernels: a prompt's result does not depend on its batch by a single bit, and a
captured step gives the bits of the eager one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_attention.selection import choose_backend
from headrace_core.batch import ForwardBatch
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.graph import GraphNeed
from headrace_core.model import BuildContext, PoolingBatch
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.parallel import SingleProcess
from headrace_core.platform import CpuPlatform
from headrace_core.pooling import PoolingParams
from headrace_kernels.cpu import library
from headrace_models.loading.loader import load_model
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import randomise
from headrace_testing.model.pooling import flat_batch, pooling_batch

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 40, "intermediate_size": 68, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 100, "pad_token_id": 1, "num_labels": 3,
}  # fmt: skip
DISTILBERT: dict[str, Any] = {
    "vocab_size": 131, "dim": 40, "hidden_dim": 68, "n_layers": 3, "n_heads": 4,
    "max_position_embeddings": 100,
}  # fmt: skip
DECODER: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "BertModel": SIZES,
    "BertForSequenceClassification": SIZES,
    "BertForTokenClassification": SIZES,
    "RobertaModel": {**SIZES, "type_vocab_size": 1},
    "RobertaForSequenceClassification": {**SIZES, "type_vocab_size": 1},
    "DistilBertModel": DISTILBERT,
    "DistilBertForSequenceClassification": DISTILBERT,
    "MPNetModel": SIZES,
    "ElectraForSequenceClassification": {**SIZES, "embedding_size": 24},
    "GteModel": SIZES,
    "NomicBertModel": SIZES,
    "JinaEmbeddingsV3Model": SIZES,
    "ModernBertModel": {**SIZES, "local_attention": 16},
    "ModernBertForSequenceClassification": {**SIZES, "local_attention": 16},
    "Qwen2Model": {**DECODER, "is_causal": False},
    "Gemma3TextModel": {**DECODER, "use_bidirectional_attention": True, "sliding_window": 14},
}
LENGTHS = (3, 61, 1, 17, 2, 33, 64, 5)
VARIANTS = list(itertools.product(FAMILIES, ("float32", "bfloat16")))


def open_native(path: Path, dtype: str) -> tuple[Any, BuildContext]:
    """The model as the worker builds it, on one thread."""
    platform = CpuPlatform()
    info = resolve(ModelConfig(model=str(path), dtype=dtype), LoadConfig(), platform)
    ops = bind_ops(KernelNeed(device="cpu", dtype=dtype, num_threads=1))
    assert ops.row_invariant

    def attention(need: Any) -> Any:
        return choose_backend(need, preferred=platform.attention_order)(ops)

    context = BuildContext(
        config=info.config,
        dtype=dtype,
        device="cpu",
        ops=ops,
        quant=quant_method(info, None, ops, device="cpu"),
        communicator=SingleProcess(),
        attention=attention,
        encoder_attention=attention,
        block_size=16,
        kv_cache_dtype="auto",
        max_model_len=info.max_model_len,
        pooling=info.pooling,
        path=info.path,
    )
    return load_model(info, context), context


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: "-".join(variant))
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, BuildContext]:
    import transformers

    architecture, dtype = request.param
    path = tmp_path_factory.mktemp(architecture)
    reference = getattr(transformers, architecture)
    model = reference(reference.config_class(**FAMILIES[architecture]))
    randomise(model)
    model.save_pretrained(path)
    return open_native(path, dtype)


def prompts() -> list[list[int]]:
    return [[2 + (7 * i + 11 * j) % 129 for j in range(n)] for i, n in enumerate(LENGTHS)]


def batch_of(model: Any, chosen: Sequence[Sequence[int]]) -> ForwardBatch:
    two = model.context.pooling.token_types
    segments = [[int(2 * i > len(p)) for i in range(len(p))] for p in chosen]
    return flat_batch(chosen, segments if two else None)


def params_of(model: Any) -> list[PoolingParams]:
    """Each task of the model, some with other settings, so that groups of a batch mix."""
    tasks = itertools.cycle(model.pooler.tasks)
    made = []
    for index, task in zip(range(len(LENGTHS)), tasks):
        params = PoolingParams(task=task)
        if task.endswith("embed"):
            params.normalize, params.dimensions = index % 3 > 0, 24 if index % 4 == 3 else None
        else:
            params.use_activation = index % 3 > 0
        made.append(params)
    return made


def results(
    model: Any, chosen: Sequence[Sequence[int]], wanted: Sequence[PoolingParams]
) -> Sequence[Tensor]:
    with torch.inference_mode():
        hidden = model.forward(batch_of(model, chosen)).split([len(p) for p in chosen])
        batch: PoolingBatch = pooling_batch(model, hidden, wanted, chosen)
        pooled: Sequence[Tensor] = model.pooler(batch)
        return pooled


def test_a_prompt_does_not_notice_its_batch(opened: tuple[Any, BuildContext]) -> None:
    model, _ = opened
    everyone, wanted = prompts(), params_of(model)
    together = results(model, everyone, wanted)
    backwards = results(model, everyone[::-1], wanted[::-1])[::-1]
    for prompt, params, result, other in zip(everyone, wanted, together, backwards):
        alone = results(model, [prompt], [params])[0]
        assert torch.equal(result, alone), (len(prompt), params)
        assert torch.equal(other, alone), (len(prompt), params)


@pytest.mark.parametrize("all_rows", [True, False])
def test_captured_steps(opened: tuple[Any, BuildContext], all_rows: bool) -> None:
    model, context = opened
    assert context.ops.step_graph is not None
    graph = context.ops.step_graph()
    two = model.context.pooling.token_types
    need = GraphNeed((64, 256), 16, num_groups=0, all_rows=all_rows, token_types=two)
    graph.capture(model.forward, need)
    for chosen in (prompts(), prompts()[3:5], prompts()[2:3]):
        batch = batch_of(model, chosen)
        if not all_rows:
            ends = batch.cu_seqlens_q[1:].long() - 1
            batch = ForwardBatch(
                **{name: getattr(batch, name) for name in batch.__dataclass_fields__
                   if name != "logits_rows"}, logits_rows=ends,
            )  # fmt: skip
        assert graph.fits(batch)
        with torch.inference_mode():
            assert torch.equal(graph.replay(batch), model.forward(batch))
    graph.close()
