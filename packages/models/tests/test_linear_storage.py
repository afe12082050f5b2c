"""How linear layers are stored, by a count of what a loaded model holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import test_families as families

from headrace_core.linear import LinearMethod, LinearSpec
from headrace_models.linear_storage import linear_reads, linear_storage, token_bytes
from headrace_models.loading.loader import Built
from headrace_testing.model.decoders import build_context

LLAMA, MIXTRAL = families.TestLlama(), families.TestMixtral()


def built(suite: Any, folder: Any, **changes: Any) -> tuple[Any, Any]:
    info = suite.resolve(suite.make_checkpoint(folder, **changes).path, max_model_len=64)
    return info, build_context(info)


def test_floats(tmp_path: Any) -> None:
    info, context = built(LLAMA, tmp_path, tie_word_embeddings=False)
    model = Built.of(info, context).model
    [storage] = linear_storage(model, "float32")
    config = info.config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    layer = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * inner
    weights = config["num_hidden_layers"] * layer + hidden * config["vocab_size"]
    assert storage.bits == 32
    assert storage.num_bytes == 4 * weights == token_bytes(model, "float32")
    assert storage.layers == 7 * config["num_hidden_layers"] + 1
    assert storage.names[-1] == "lm_head"
    assert set(storage.names[:3]) == {"q_proj", "k_proj", "v_proj"}


def test_a_tied_head_is_read(tmp_path: Any) -> None:
    info, context = built(LLAMA, tmp_path, tie_word_embeddings=True)
    [storage] = linear_storage(Built.of(info, context).model, "bfloat16")
    assert "lm_head" in storage.names
    assert storage.bits == 16


def test_a_token_reads_the_experts_that_it_goes_to(tmp_path: Any) -> None:
    info, context = built(MIXTRAL, tmp_path)
    model, config = Built.of(info, context).model, info.config
    experts, chosen = config["num_local_experts"], config["num_experts_per_tok"]
    whole = sum(storage.num_bytes for storage in linear_storage(model, "float32"))
    one = 3 * 4 * config["hidden_size"] * config["intermediate_size"] * config["num_hidden_layers"]
    assert chosen < experts
    assert token_bytes(model, "float32") == whole - (experts - chosen) * one


@pytest.mark.parametrize("kept", [True, False])
def test_layers_are_told_apart_by_their_bits(kept: bool, tmp_path: Any) -> None:
    info, context = built(LLAMA, tmp_path, tie_word_embeddings=False)
    plain = context.quant

    class Half(LinearMethod):
        """Says that it keeps half of a byte for each weight."""

        def create(self, spec: LinearSpec) -> Any:
            return plain.for_layer(spec).create(spec)

        def finish(self, spec: LinearSpec, tensors: Any) -> Any:
            raise NotImplementedError

        def apply(self, state: Any, x: Any, bias: Any = None) -> Any:
            raise NotImplementedError

        def kept_bytes(self, spec: LinearSpec) -> int | None:
            return spec.in_features * spec.out_features // 2 if kept else None

    class Method(type(plain)):  # type: ignore[misc]
        def for_layer(self, spec: LinearSpec) -> LinearMethod:
            return Half() if spec.name.endswith("down_proj") else plain.for_layer(spec)

    method = Method(context.ops)
    model = Built.of(info, dataclasses.replace(context, quant=method)).model
    found = {storage.bits: storage.names for storage in linear_storage(model, "float32")}
    assert found.keys() == ({32.0, 4.0} if kept else {32.0})
    if kept:
        assert found[4.0] == ("down_proj",)


def test_reads_tell_heads_and_gates(tmp_path: Any) -> None:
    for suite, gated in ((LLAMA, 1), (MIXTRAL, 1)):
        info, context = built(suite, tmp_path / suite.__class__.__name__)
        config, reads = info.config, list(linear_reads(Built.of(info, context).model, "float32"))
        [head] = [read for read in reads if read.is_head]
        assert head.spec.out_features == config["vocab_size"]
        mlps = [read for read in reads if read.is_gated]
        experts = config.get("num_local_experts", gated)
        assert len(mlps) == experts * config["num_hidden_layers"]
        assert {read.spec.out_features for read in mlps} == {2 * config["intermediate_size"]}
