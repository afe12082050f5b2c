"""GGUF files of blocks are transformers' models with the floats that the blocks stand for, by gguf's own
dequantizer: alone, batched, chunked, preempted, over two ranks, in mixtures of types and of experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import gguf_blocks
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from quantized_checkpoints import IntegerConformance
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.errors import ConfigError, HeadraceError, WeightsError
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_core.ops import KernelNeed, QuantizedWeight, bind_ops
from headrace_core.parallel import Communicator
from headrace_models.layers.base import walk
from headrace_models.layers.embedding import QuantizedEmbedding
from headrace_models.layers.moe.experts import Experts
from headrace_models.loading.loader import Built, load_model
from headrace_models.lora.adapters import Adapters
from headrace_models.quantization import quant_method
from headrace_models.weight_bytes import kept_bytes
from headrace_quant.gguf import method as gguf_method
from headrace_quant.gguf.packing import packed_weight
from headrace_reference.quantized import dequantized
from headrace_testing.model.adapters import linear_modules, merged, write_adapter
from headrace_testing.model.decoders import (
    Checkpoint,
    ModelConformance,
    PagedDriver,
    build_context,
    run_ranks,
)

writing = gguf_blocks.gguf_writing()
DENSE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_theta": 10000.0,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    **DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


@functools.cache
def is_native(kind: str) -> bool:
    """True if the CPU kernel holds and multiplies blocks of a type."""
    need = KernelNeed(device="cpu", dtype="float32")
    op = bind_ops(need, choose={"quant_linear": "cpu"}).quant_linear
    blocks = gguf_blocks.random_blocks(Type[kind], 16, seed=0)
    weight = packed_weight(kind, torch.from_numpy(blocks))
    x = torch.randn(5, weight.values.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        packed = op.pack(weight, "float32", activations="float")
        rows = op.rows(torch.arange(16), packed)
    except (HeadraceError, AttributeError):
        return False
    meant = dequantized(weight)
    return torch.allclose(rows, meant) and torch.allclose(op(x, packed), x @ meant.T, atol=1e-3)


class GGUFConformance(IntegerConformance):
    """The suite of every family, with a GGUF file of blocks."""

    architecture: ClassVar[str] = "llama"
    types: ClassVar[Mapping[str, str]]
    """End of a GGUF tensor's stem -> type of its blocks; ``""``: of all others that are no norms."""
    provider: ClassVar[str] = "reference"
    most: ClassVar[float] = 1.15
    """Times the file's bytes that the model may take."""

    def kind_of(self, name: str) -> Type:
        stem = name.removesuffix(".weight")
        if "norm" in stem or stem.endswith("gate_inp"):
            return Type.F32
        return Type[next(kind for end, kind in self.types.items() if stem.endswith(end))]

    def make_checkpoint(
        self, folder: Path, seed: int = 0, splits: int = 0, **overrides: Any
    ) -> Checkpoint:
        ModelConformance.make_checkpoint(self, folder, seed, **overrides)
        model = folder / "model.safetensors"
        file = writing.write(
            folder, folder / "m.gguf", self.architecture, lambda name, _: self.kind_of(name),
            splits=splits, encode=gguf_blocks.encode,
        )  # fmt: skip
        self.write_floats(model)
        reference = self.hf_class().from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        return Checkpoint(reference.eval(), file)

    def write_floats(self, model: Path) -> None:
        """Replace a checkpoint's weights by those that the blocks stand for."""
        config = {"num_attention_heads": 1, "num_key_value_heads": 1}
        tensors = load_file(model)
        for name, tensor in tensors.items():
            stored, _ = writing._renamed(name, tensor, config, "")
            if tensor.dim() == 2:
                floats = gguf_blocks.decoded(tensor.float().numpy(), self.kind_of(stored))
                tensors[name] = torch.from_numpy(np.ascontiguousarray(floats))
        save_file(tensors, model, metadata={"format": "pt"})

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return super().resolve(path, **{"dtype": "float32", **settings})

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        if self.provider != "reference":
            need = KernelNeed(device="cpu", dtype=info.dtype)
            ops = bind_ops(need, choose={"*": "reference", "quant_linear": self.provider})
            context = dataclasses.replace(context, ops=ops)
        return super().load(info, context, **settings)

    def test_linear_layers_are_stored_as_quantization_says(self, checkpoint: Checkpoint) -> None:
        """The model takes as many bytes as the file, and rotary tables; IQ1 to IQ3 take more."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        context = build_context(info)
        method = quant_method(info, None, context.ops, device=context.device)
        built = Built.of(info, dataclasses.replace(context, quant=method))
        kept, stored = kept_bytes(built.model, info.dtype), checkpoint.path.stat().st_size
        assert kept < self.most * stored, (kept, stored)

    def test_the_table_stays_in_blocks(self, model: CausalLM) -> None:
        assert any(isinstance(piece, QuantizedEmbedding) for _, piece in walk(model))

    def test_sharded_checkpoint_equals_single(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        first = self.make_checkpoint(tmp_path, splits=7).path
        assert first.name == "m-00001-of-00004.gguf" or len(list(tmp_path.glob("*.gguf"))) > 2
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(first)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    def test_tied_embeddings_the_other_way(self, tmp_path: Path) -> None:
        """The tied table is held once, and the head multiplies with it."""
        if not self.flips_ties:
            pytest.skip("this family exists in one way only")
        tied = not bool(getattr(self.hf_config(), "tie_word_embeddings", False))
        other = self.make_checkpoint(tmp_path, seed=1, tie_word_embeddings=tied)
        prompt = self.prompt(12)
        logits = PagedDriver(self.open(other.path)).step({"a": prompt})
        self.assert_close(logits, other.logprobs(prompt))

    def mutants(self) -> Mapping[str, Callable[[QuantizedWeight], QuantizedWeight]]:
        return {
            "swapped halves of bytes": lambda w: dataclasses.replace(
                w, values=_swapped(w.values, w.group_size)
            ),
            "zero point off by one": lambda w: dataclasses.replace(
                w, values=(w.values - 1).clamp(-(1 << w.bits - 1))
            ) if w.zero_points is None else dataclasses.replace(w, zero_points=w.zero_points + 1),
            "transposed scales": lambda w: dataclasses.replace(
                w, scales=w.scales.T.contiguous().view(w.scales.shape)
            ),
        }  # fmt: skip

    @pytest.mark.parametrize(
        "mutant", ["swapped halves of bytes", "zero point off by one", "transposed scales"]
    )
    def test_scales_count(
        self, mutant: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blocks that are read wrongly make another model."""
        change = self.mutants()[mutant]
        monkeypatch.setattr(
            gguf_method, "packed_weight", lambda name, raw: change(packed_weight(name, raw))
        )
        prompt = self.prompt(12)
        logits = PagedDriver(self.open(checkpoint.path)).step({"a": prompt})
        error = torch.log_softmax(logits, -1) - checkpoint.logprobs(prompt)
        assert float(error.abs().max()) > 10 * self.tolerance

    def test_missing_tensor(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        file = writing.write(
            checkpoint.path.parent, tmp_path / "m.gguf", self.architecture,
            lambda name, _: self.kind_of(name), encode=gguf_blocks.encode,
            omit=["blk.1.attn_output.weight"],
        )  # fmt: skip
        with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.o_proj\.weight"):
            self.open(file)

    # Of safetensors files; what a GGUF file's tensors are checked for is tested with its format.
    test_tensor_of_wrong_shape: ClassVar[None] = None
    test_tensor_of_wrong_dtype: ClassVar[None] = None
    test_left_over_tensor: ClassVar[None] = None


def _swapped(values: Tensor, size: int | None) -> Tensor:
    """The two halves of each group the other way round."""
    assert size is not None
    groups = values.view(len(values), -1, 2, size // 2)
    return groups.flip(2).reshape(values.shape)


def check_adapter(suite: GGUFConformance, checkpoint: Checkpoint, folder: Path) -> None:
    """An adapter of all linear modules, by transformers' names, and the base beside it."""
    info = suite.resolve(checkpoint.path, max_model_len=64)
    context = build_context(info)
    slots = Adapters(
        context.ops, max_loras=1, max_lora_rank=8, dtype="float32", device="cpu", max_tokens=64,
        max_logits_rows=64,
    )  # fmt: skip
    model = suite.load(info, dataclasses.replace(context, adapters=slots))
    added = write_adapter(folder / "adapter", linear_modules(checkpoint.reference))
    slots.place(0, slots.read(str(folder / "adapter")))
    prompt = suite.prompt(9)
    rows = torch.tensor([0] * 9 + [-1] * 9, dtype=torch.int32)
    slots.choose(rows, rows)
    found = PagedDriver(model).step({"a": prompt, "b": prompt}).log_softmax(-1)
    changed = Checkpoint(merged(checkpoint.reference, added), checkpoint.path)
    for half, expected in zip(found.split(9), (changed, checkpoint), strict=True):
        torch.testing.assert_close(half, expected.logprobs(prompt), atol=1e-3, rtol=0)
    assert float((found[:9] - found[9:]).abs().max()) > 0.1


class Dense:
    def hf_class(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(**{**DENSE, **overrides})


class Mixture:
    flips_ties = False
    architecture = "qwen3moe"

    def hf_class(self) -> Any:
        from transformers import Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(**{**MIXTURE, **overrides})

    def test_experts_run_together(self, model: CausalLM) -> None:
        experts = [piece for _, piece in walk(model) if isinstance(piece, Experts)]
        assert experts
        assert all(each.routed is not None for each in experts)


class TestBlocksOf32(Dense, GGUFConformance):
    """Query, key and value of three types."""

    types: ClassVar = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_1", "attn_output": "Q5_0",
                       "ffn_down": "Q8_0", "token_embd": "Q5_0", "": "Q4_0"}  # fmt: skip

    def test_an_adapter(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        check_adapter(self, checkpoint, tmp_path)


class TestMixtureOf4And6Bits(Dense, GGUFConformance):
    """As Q4_K_M: values, down projections and the table in 6 bits."""

    types: ClassVar = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K",
                       "": "Q4_K"}  # fmt: skip


class TestOtherBlocksOf256(Dense, GGUFConformance):
    """Gate and up of two types."""

    types: ClassVar = {"attn_q": "Q2_K", "attn_k": "Q3_K", "attn_v": "Q5_K", "ffn_gate": "IQ4_XS",
                       "ffn_up": "IQ4_NL", "token_embd": "Q3_K", "": "Q5_K"}  # fmt: skip


class TestTernaryAndFloatBlocks(Dense, GGUFConformance):
    types: ClassVar = {"attn_q": "TQ1_0", "attn_k": "TQ2_0", "attn_v": "MXFP4", "ffn_up": "NVFP4",
                       "token_embd": "MXFP4", "": "NVFP4"}  # fmt: skip


class TestVectors(Dense, GGUFConformance):
    """Every type that chooses vectors: fused with others and alone, the table, too."""

    most = 1.7
    types: ClassVar = {"attn_q": "IQ2_XXS", "attn_k": "IQ3_XXS", "attn_v": "Q4_K", "attn_output": "IQ2_XS",
                       "ffn_gate": "IQ1_M", "ffn_up": "IQ1_M", "ffn_down": "IQ3_S", "token_embd": "IQ3_S",
                       "output": "IQ1_S", "": "IQ2_S"}  # fmt: skip


class TestVectorsOfOneType(Dense, GGUFConformance):
    """As IQ2_S files: query, key and value in one, down projections of one more bit."""

    most = 1.8
    types: ClassVar = {"ffn_down": "IQ3_XXS", "token_embd": "IQ2_S", "ffn_gate": "IQ1_S", "ffn_up": "IQ1_S",
                       "": "IQ2_S"}  # fmt: skip


class TestExperts(Mixture, GGUFConformance):
    types: ClassVar = {"down_exps": "Q6_K", "attn_v": "Q6_K", "output": "Q6_K", "": "Q4_K"}

    def test_an_adapter(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        check_adapter(self, checkpoint, tmp_path)


class TestExpertsOfVectors(Mixture, GGUFConformance):
    most = 1.8
    types: ClassVar = {"down_exps": "IQ3_XXS", "attn_v": "Q4_K", "output": "Q6_K", "token_embd": "Q4_K",
                       "gate_exps": "IQ2_XXS", "up_exps": "IQ2_XXS", "": "IQ1_M"}  # fmt: skip


class TestNativeLayers(Dense, GGUFConformance):
    """The CPU kernel's layers beside a table of floats."""

    provider = "cpu"
    flips_ties = False
    types: ClassVar = {"attn_v": "Q8_0", "ffn_down": "Q8_0", "token_embd": "F16", "": "Q4_0"}
    test_the_table_stays_in_blocks: ClassVar[None] = None


def _native(suite: type[GGUFConformance]) -> Any:
    lacking = sorted({kind for kind in suite.types.values() if not is_native(kind)})
    mark = pytest.mark.skipif(bool(lacking), reason=f"the CPU kernel does not take {lacking}")
    return mark(type(f"{suite.__name__}Native", (suite,), {"provider": "cpu"}))


TestBlocksOf32Native = _native(TestBlocksOf32)
TestMixtureOf4And6BitsNative = _native(TestMixtureOf4And6Bits)
TestOtherBlocksOf256Native = _native(TestOtherBlocksOf256)
TestTernaryAndFloatBlocksNative = _native(TestTernaryAndFloatBlocks)
TestVectorsNative = _native(TestVectors)
TestVectorsOfOneTypeNative = _native(TestVectorsOfOneType)
TestExpertsOfVectorsNative = _native(TestExpertsOfVectors)
TestExpertsNative = _native(TestExperts)


def test_ranks_whose_inputs_end_within_a_block_are_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    """Blocks that become floats may be cut anywhere."""
    suite = TestMixtureOf4And6Bits()
    checkpoint = suite.make_checkpoint(tmp_path, intermediate_size=256)
    info = suite.resolve(checkpoint.path, max_model_len=64)
    prompt = suite.prompt(9)

    def work(wanted: str | None, group: Communicator) -> Tensor:
        context = build_context(info, communicator=group)
        method = quant_method(info, wanted, context.ops, device="cpu")
        return PagedDriver(load_model(info, dataclasses.replace(context, quant=method))).step(
            {"a": prompt}
        )

    words = (
        r"layer 'model\.layers\.0\.mlp\.down_proj'.*\[256, 128\].*blocks of 256 \(Q6_K\)"
        r".*tensor_parallel_size.*none"
    )
    with pytest.raises(ConfigError, match=words):
        run_ranks(2, functools.partial(work, None))
    for logits in run_ranks(2, functools.partial(work, "none")):
        suite.assert_close(logits, checkpoint.logprobs(prompt))
