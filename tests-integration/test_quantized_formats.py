"""Every quantization method that is installed has whole models beside transformers', by the table in
:mod:`quantized_formats`; and one of each through the real engine, in every way of running."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import quantized_formats
import stored_variants
import test_rounded_models as rounded
from families import VOCAB_SIZE
from modes import MODES, NUM_TOKENS, PROMPTS, run
from quantized_checkpoints import FusedModules, IntegerConformance
from quantized_formats import ALIASES, PROOFS, REFUSED, Proof, method_of
from test_gguf_packed import GGUFConformance
from test_quantized_mutations import FORMATS as MISREAD

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant import compressed_tensors, modelopt, quark, torchao
from headrace_quant.gguf.blocks import KINDS
from headrace_testing.model.decoders import Checkpoint, ModelConformance

GROUP = "headrace.quantization"
HELD = (
    "test_one_request", "test_requests_of_different_lengths", "test_prefill_in_chunks", "test_preemption",
    "test_decoding_step_by_step",
)  # fmt: skip
"""Tests that no suite of the table may switch off."""


def test_every_installed_method_is_in_the_table() -> None:
    """A new format without a whole model fails here: add it to ``quantized_formats.PROOFS``."""
    ours = {
        name for name, entry in plugins.installed(GROUP).items() if "headrace_quant" in str(entry)
    }
    assert ours == {*PROOFS, *ALIASES, *REFUSED}


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_are_of_the_same_class(name: str) -> None:
    assert plugins.load(GROUP, name) is plugins.load(GROUP, ALIASES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_known_names_that_are_refused(name: str) -> None:
    ops = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
    with pytest.raises(ConfigError, match=name):
        plugins.load(GROUP, name).from_config({"quant_method": name}, ops)


@pytest.mark.parametrize("name", PROOFS)
def test_suites_show_what_the_table_says(name: str) -> None:
    proof = PROOFS[name]
    suites = list(proof.suites())
    assert suites, name
    for suite in suites:
        of, _ = method_of(suite)
        classes = plugins.load(GROUP, of), plugins.load(GROUP, name)
        assert classes[0] is classes[1] or issubclass(*classes) or issubclass(*classes[::-1]), suite
        assert all(getattr(suite, test, None) is not None for test in HELD), suite
        assert suite.tensor_parallel == 2 or getattr(suite, "refusal", ""), suite
        assert suite.tensor_parallel == 2 or proof.one_rank or suite in proof.schemes, suite
    for suite in (proof.mixture, *proof.models[:1]):
        if not isinstance(suite, str):
            assert _has_experts(suite) is (suite is proof.mixture), suite
    assert any(method_of(suite)[0] == name for suite in suites)
    assert all((proof.parts, proof.mixture, proof.misread)), "a suite, or why there is none"


@pytest.mark.parametrize("name", PROOFS)
def test_suites_run(name: str) -> None:
    """Each is a class that pytest collects, or a variant that :mod:`test_stored_variants` runs, or of experts
    that are rounded."""
    for suite in PROOFS[name].suites():
        is_collected = suite.__name__.startswith("Test")
        is_variant = stored_variants.VARIANTS.get(suite.__name__) is suite
        is_rounded = issubclass(suite, rounded.RoundedConformance) and name in rounded.OF_EXPERTS
        assert is_collected or is_variant or is_rounded or suite is quantized_formats.PlainModel


@pytest.mark.parametrize("name", PROOFS)
def test_misread_tensors_are_tried(name: str) -> None:
    tried = PROOFS[name].misread
    if isinstance(tried, str):
        return
    for suite in tried:
        assert suite in MISREAD or issubclass(suite, GGUFConformance), suite


def _has_experts(suite: type[ModelConformance]) -> bool:
    config = suite().hf_config()
    return any(
        getattr(config, key, 0) for key in ("num_experts", "num_local_experts", "n_routed_experts")
    )


def _found(key: str, block: Any) -> set[str]:
    """Values of a key, anywhere in a block."""
    if isinstance(block, dict):
        own = {block[key]} if isinstance(block.get(key), str) else set()
        return own.union(*(_found(key, value) for value in block.values()))
    return (
        set().union(*(_found(key, value) for value in block)) if isinstance(block, list) else set()
    )


@pytest.mark.parametrize(
    ("name", "key", "served"),
    [
        ("compressed-tensors", "format", compressed_tensors.FORMATS),
        ("modelopt", "quant_algo", (*modelopt.ALGORITHMS, modelopt.MIXED)),
        ("quark", "dtype", quark.DTYPES),
        ("torchao", "_type", torchao.SCHEMES),
    ],
)
def test_every_way_of_storing_has_a_model(name: str, key: str, served: Collection[str]) -> None:
    shown: set[str] = set()
    for suite in PROOFS[name].suites():
        made: Any = suite()
        shown |= _found(key, made.quantization)
    if name == "compressed-tensors":
        shown.add("float-quantized")  # test_fp8's suites, which build their block themselves
    assert set(served) <= shown


def test_every_block_of_gguf_has_a_model() -> None:
    shown = {kind for suite in PROOFS["gguf"].suites() for kind in suite.types.values()}  # type: ignore[attr-defined]
    assert set(KINDS) <= shown


def test_parts_that_differ_are_parts_of_fused_layers() -> None:
    """The suite's layers of one block are not all stored alike, or come as one module."""
    for name, proof in PROOFS.items():
        if isinstance(proof.parts, str) or not issubclass(proof.parts, IntegerConformance):
            continue
        if issubclass(proof.parts, FusedModules | GGUFConformance):
            continue
        suite: Any = proof.parts()
        weight = PROOFS[name] and _random(64, 128)
        kinds = {}
        for layer in range(2):
            for part in (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
            ):
                tensors, _ = suite.module(f"model.layers.{layer}.{part}", weight)
                shapes = tuple((key, tuple(t.shape), t.dtype) for key, t in sorted(tensors.items()))
                kinds.setdefault((layer, part.split(".")[0]), set()).add(shapes)
        assert any(len(shapes) > 1 for shapes in kinds.values()), name


def _random(rows: int, inputs: int) -> Any:
    import torch

    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0))


# ---- through the engine


def _engine_suite(name: str, proof: Proof) -> type[ModelConformance]:
    if name == "mxfp4" or not proof.models:
        assert not isinstance(proof.mixture, str)
        return proof.mixture
    return proof.models[0]


ENGINES = {name: _engine_suite(name, proof) for name, proof in PROOFS.items()} | {
    f"{name} of experts": proof.mixture
    for name, proof in PROOFS.items()
    if not isinstance(proof.mixture, str) and proof.models and name != "mxfp4"
}
WAYS = ("batched", "chunked", "preempted")


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("name", ENGINES)
def test_the_engine(name: str, tmp_path: Path) -> None:
    """Native kernels, captured steps, a real scheduler: tokens and log-probabilities are transformers', and
    bits do not depend on how requests run."""
    suite = ENGINES[name]()
    folder = tmp_path / f"{suite.hf_config().model_type}-0"
    made = suite.make_checkpoint(folder, vocab_size=VOCAB_SIZE)
    for module in made.reference.modules():
        module._forward_pre_hooks.clear()  # activations stay as they are below
    method, is_stored = method_of(type(suite))
    settings: dict[str, Any] = {} if method == "none" else {"quantization_activations": "float"}
    if not is_stored:
        settings["quantization"] = method
    alone = run(made.path, alone=True, **settings)
    for prompt, found in zip(PROMPTS, alone, strict=True):
        _assert_as_transformers(made, prompt, found)
    for way in WAYS:
        assert run(made.path, **MODES[way], **settings) == alone, way


def _assert_as_transformers(
    made: Checkpoint, prompt: list[int], found: list[tuple[int, float]]
) -> None:
    tokens = [token for token, _ in found]
    assert len(tokens) == NUM_TOKENS
    logprobs = made.logprobs(prompt + tokens[:-1])[len(prompt) - 1 :]
    for row, (token, logprob) in zip(logprobs, found, strict=True):
        assert float(row.max() - row[token]) < 1e-3, "another token is likelier"
        assert logprob == pytest.approx(float(row[token]), abs=1e-3)
