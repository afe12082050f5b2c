"""Models in FP8 are transformers' with the floats that the codes and scales stand for."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from quantized_checkpoints import divide
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import Built, load_model
from headrace_models.loading.sharded_state import save_sharded_state
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_models.weight_bytes import kept_bytes
from headrace_testing.model.decoders import (
    Checkpoint,
    ModelConformance,
    PagedDriver,
    build_context,
    run_ranks,
)

TINY: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **TINY, "num_key_value_heads": 4, "kv_lora_rank": 22, "q_lora_rank": 26, "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6, "v_head_dim": 18, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "n_group": 4,
    "topk_group": 2, "rope_parameters": {"rope_theta": 300.0},
}  # fmt: skip
QUANTIZED = re.compile(r".*(_proj|_proj_with_mqa|\.wq_b|\.wk)\.weight")
PLAIN = re.compile(r".*weights_proj\.weight")


def pack(
    weight: Tensor, rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """weight [N, K] -> codes, scales of blocks that differ by up to 16 times, and what they mean."""
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            larger = 2.0 ** int(torch.randint(0, 5, (), generator=generator))
            scales[i, j] = part.abs().max() / 448 * larger
    if dtype == torch.float8_e8m0fnu:
        scales = scales.log2().ceil().exp2()
    scales = scales.to(dtype).float()
    wide = scales.repeat_interleave(rows, 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return [codes, scales.to(dtype), codes.float() * wide]


class Fp8Conformance(ModelConformance):
    """The suite of every family, with weights in FP8 and transformers' model with what they mean."""

    block: ClassVar[tuple[int, int] | None] = (16, 16)
    is_packed: ClassVar[bool] = False
    """Blocks end with the inputs of layers, and have 32 or more of them."""
    floats: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of layers that are in floats."""
    scale_name: ClassVar[str] = "weight_scale_inv"
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    quantization: ClassVar[dict[str, Any]] = {
        "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }  # fmt: skip

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        super().make_checkpoint(folder, seed, **overrides)
        tensors = load_file(folder / "model.safetensors")
        stored, floats = self.quantize(tensors)
        save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
        reference = self.hf_class().from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = self.block_of_config()
        (folder / "config.json").write_text(json.dumps(config))
        return Checkpoint(reference.eval(), folder)

    def block_of_config(self) -> dict[str, Any]:
        size = None if self.block is None else list(self.block)
        return {"quant_method": "fp8", "weight_block_size": size, **self.quantization}

    def quantize(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The checkpoint, and the floats that it means."""
        generator, stored, floats = torch.Generator().manual_seed(5), dict(tensors), dict(tensors)
        for name, tensor in tensors.items():
            is_left = PLAIN.fullmatch(name) or name.endswith(self.floats or ("-",))
            if QUANTIZED.fullmatch(name) and not is_left:
                rows, columns = self.block or tuple(tensor.shape)
                stored[name], scales, floats[name] = pack(
                    tensor, rows, columns, self.scale_dtype, generator
                )
                module = name.removesuffix("weight")
                stored[module + self.scale_name] = scales if self.block else scales.reshape(())
                if self.quantization["activation_scheme"] == "static":
                    stored[f"{module}input_scale"] = torch.ones(())
        assert len(stored) > len(tensors) + 10
        return stored, floats

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return resolve(ModelConfig(model=str(path), **settings), LoadConfig(), CpuPlatform())

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        return load_model(info, with_method(info, context), load=LoadConfig(**settings))

    def test_linear_layers_are_stored_as_quantization_says(self, checkpoint: Checkpoint) -> None:
        """Packed where blocks allow it, else in floats of the activations' dtype; the footprint says so."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len, dtype="bfloat16")
        context = with_method(info, build_context(info))
        assert context.quant.name == self.block_of_config()["quant_method"]
        plain = kept_bytes(Built.of(info, build_context(info)).model, info.dtype)
        kept = kept_bytes(Built.of(info, context).model, info.dtype)
        assert kept < 0.75 * plain if self.is_packed else kept == plain

    def test_sharded_checkpoint_equals_single(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        """A layer's tensors may lie in several files."""
        divide(checkpoint.path, tmp_path)
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    def test_scales_of_other_blocks_show(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        def turn(tensors: dict[str, Tensor], _: str) -> None:
            for name, tensor in tensors.items():
                if name.endswith(self.scale_name) and "down_proj" in name:
                    tensors[name] = (
                        tensor.flatten().roll(1).view(tensor.shape) if self.block else tensor * 2
                    )

        self._rewrite(checkpoint, tmp_path, turn)
        prompt = self.prompt(12)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        error = torch.log_softmax(logits, -1) - checkpoint.logprobs(prompt)
        assert float(error.abs().max()) > 100 * self.tolerance

    def test_missing_scale(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        name = "model.layers.1.self_attn.o_proj.weight"
        scale = name.replace("weight", self.scale_name)
        self._rewrite(checkpoint, tmp_path, lambda tensors, _: tensors.pop(scale))
        self._assert_refused(tmp_path, name, "in FP8, but their scales", "are missing")

    def test_scale_of_wrong_shape(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        scale = f"model.layers.1.self_attn.o_proj.{self.scale_name}"
        self._rewrite(checkpoint, tmp_path, lambda t, _: t.update({scale: torch.ones(2, 2, 2)}))
        self._assert_refused(tmp_path, scale, "model.safetensors", "shape")

    def test_ignored_layer_in_fp8(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        self._rewrite(checkpoint, tmp_path, lambda tensors, _: None)
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["modules_to_not_convert"] = ["o_proj"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        self._assert_refused(tmp_path, "o_proj.weight", "'o_proj'", "not converted")


def with_method(info: ModelInfo, context: BuildContext) -> BuildContext:
    """The context with the method that the checkpoint says."""
    method = quant_method(info, None, context.ops, device=context.device)
    return dataclasses.replace(context, quant=method)


class TestDeepseekV3(Fp8Conformance):
    """No size is a multiple of the blocks', the rows of a head of kv_b_proj neither; the layer that
    predicts further tokens is passed over."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import DeepseekV3ForCausalLM

        return DeepseekV3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DeepseekV3Config

        return DeepseekV3Config(**{**LATENT, "num_nextn_predict_layers": 1, **overrides})

    def quantize(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One whose weights could not be decoded: they have no scales."""
        stored, floats = super().quantize(tensors)
        last = [name for name in stored if "layers.2." in name and "scale_inv" not in name]
        extra = {name.replace("layers.2.", "layers.3."): stored[name].clone() for name in last}
        return {**stored, **extra}, floats


class CompressedTensors(Fp8Conformance):
    """FP8 as llm-compressor writes it, with activations that are dynamic or static."""

    scale_name = "weight_scale"
    strategy: ClassVar[str]
    activations: ClassVar[dict[str, Any]] = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
    }  # fmt: skip

    def hf_class(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(**{**TINY, **overrides})

    def block_of_config(self) -> dict[str, Any]:
        weights = {
            "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
            "strategy": self.strategy, "block_structure": list(self.block or ()) or None,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": self.activations,
                "output_activations": None,
            }},
        }  # fmt: skip

    def test_ignored_layer_in_fp8(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        """Its scale belongs to no layer then."""
        self._rewrite(checkpoint, tmp_path, lambda tensors, _: None)
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["ignore"] = ["lm_head", "re:.*o_proj"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        self._assert_refused(tmp_path, "o_proj.weight", "float8_e4m3fn")


class TestCompressedBlocks(CompressedTensors):
    strategy = "block"


class TestCompressedTensor(CompressedTensors):
    """One scale, and those of static activations beside it."""

    is_packed = True
    strategy = "tensor"
    block = None
    activations: ClassVar = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    quantization: ClassVar = {"activation_scheme": "static"}


class TestCompressedChannels(CompressedTensors):
    """FP8_DYNAMIC: a scale for each output, in bfloat16."""

    is_packed = True
    strategy = "channel"
    block = (1, 4096)
    scale_dtype = torch.bfloat16

    def block_of_config(self) -> dict[str, Any]:
        config = super().block_of_config()
        config["config_groups"]["group_0"]["weights"]["block_structure"] = None
        return config


class TestDeepseekV3Blocks128(TestDeepseekV3):
    """The blocks of published checkpoints, with sizes on both sides of one."""

    block = (128, 128)
    quantization: ClassVar = {"fmt": "e4m3", "activation_scheme": "dynamic"}

    def hf_config(self, **overrides: Any) -> Any:
        sizes = {"hidden_size": 136, "kv_lora_rank": 134, "qk_nope_head_dim": 40, "v_head_dim": 44}
        return super().hf_config(**{**sizes, "num_hidden_layers": 3, **overrides})


class TestDeepseekV32(Fp8Conformance):
    """The indexer's projections are in FP8, the weights of its heads are not, which no key says.
    Scales in one byte."""

    flips_ties = False
    scale_dtype = torch.float8_e8m0fnu

    def hf_class(self) -> Any:
        from transformers import DeepseekV32ForCausalLM

        return DeepseekV32ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DeepseekV32Config

        indexer = {"index_topk": 11, "index_head_dim": 18, "index_n_heads": 24}
        return DeepseekV32Config(**{**LATENT, **indexer, **overrides})


class TestQwen3(Fp8Conformance):
    """Blocks that are not square, a cut between two ranks within one, and scales in bfloat16."""

    block = (16, 32)
    scale_dtype = torch.bfloat16

    def hf_class(self) -> Any:
        from transformers import Qwen3ForCausalLM

        return Qwen3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen3Config

        return Qwen3Config(**{**TINY, "head_dim": 22, **overrides})

    def test_sharded_state_holds_the_floats(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        save_sharded_state(info, with_method(info, build_context(info)), tmp_path)
        saved = self.resolve(tmp_path, max_model_len=self.max_model_len)
        again = self.load(saved, build_context(saved), load_format="sharded_state")
        prompt = self.prompt(9)
        expected = PagedDriver(model).step({"a": prompt})
        assert torch.equal(PagedDriver(again).step({"a": prompt}), expected)

    def test_the_name_by_hand(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path)
        ops = build_context(info).ops
        assert quant_method(info, "fp8", ops, device="cpu").name == "fp8"
        with pytest.raises(ConfigError, match=r"'int8'.*is quantized with 'fp8'"):
            quant_method(info, "int8", ops, device="cpu")

    def test_fp8_without_a_method(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        with pytest.raises(WeightsError, match="float8_e4m3fn"):
            load_model(info, build_context(info))


class TestQwen3OneScale(TestQwen3):
    """A scale for each of the fused parts, and static ones of activations, which are passed over."""

    is_packed = True
    block = None
    scale_name = "weight_scale"
    scale_dtype = torch.float32
    quantization: ClassVar = {"activation_scheme": "static", "ignored_layers": ["lm_head"]}


class TestQwen3Moe(Fp8Conformance):
    def hf_class(self) -> Any:
        from transformers import Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen3MoeConfig

        own = {"head_dim": 22, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
               "mlp_only_layers": [0]}  # fmt: skip
        return Qwen3MoeConfig(**{**TINY, **own, **overrides})

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_by_transformers_code(self, checkpoint: Checkpoint, tmp_path: Path, ranks: int) -> None:
        """Experts become one tensor after they have become floats; so they are saved."""
        settings: dict[str, Any] = {"model_impl": "transformers", "max_model_len": 64}
        info, prompt = self.resolve(checkpoint.path, **settings), self.prompt(9)
        save_sharded_state(info, with_method(info, build_context(info)), tmp_path, world_size=ranks)
        saved = self.resolve(tmp_path, **settings)

        def work(communicator: Communicator) -> None:
            for each, form in ((info, "auto"), (saved, "sharded_state")):
                context = build_context(each, communicator=communicator)
                logits = PagedDriver(self.load(each, context, load_format=form)).step({"a": prompt})
                self.assert_close(logits, checkpoint.logprobs(prompt))

        run_ranks(ranks, work)


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}


class TestQwen3Packed(TestQwen3):
    """Blocks that stay packed, of which a rank's inputs are one and a half; two layers in floats that no list
    names, and a value that one does."""

    is_packed = True
    block = (48, 64)
    floats = ("0.mlp.down_proj.weight", "1.self_attn.q_proj.weight", "1.self_attn.k_proj.weight",
              "1.self_attn.v_proj.weight", "2.self_attn.v_proj.weight")  # fmt: skip
    quantization: ClassVar = {"modules_to_not_convert": ["model.layers.2.self_attn.v_proj"],
                              "activation_scheme": "dynamic"}  # fmt: skip

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{**WIDE, "head_dim": 32, **overrides})


class TestQwen3MoePacked(TestQwen3Moe):
    is_packed = True
    block = (16, 32)

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(
            **{**WIDE, "head_dim": 32, "moe_intermediate_size": 64, **overrides}
        )


class TestCompressedBlocksPacked(TestCompressedBlocks):
    is_packed = True
    block = (128, 128)

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(**{**WIDE, **overrides})


class TestDeepseekV32Packed(TestDeepseekV32):
    """Packed beside what becomes floats (``kv_b_proj``) and what is in floats (``weights_proj``)."""

    is_packed = True
    block = (32, 32)

    def hf_config(self, **overrides: Any) -> Any:
        sizes = {
            **WIDE,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "v_head_dim": 32,
            "moe_intermediate_size": 64,
        }
        return super().hf_config(**{**sizes, **overrides})


class Mistral(TestQwen3OneScale):
    scale_name = "qscale_weight"

    def hf_class(self) -> Any:
        from transformers import MistralForCausalLM

        return MistralForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import MistralConfig

        return MistralConfig(**{**TINY, "head_dim": 22, "sliding_window": None, **overrides})


MISTRALS_NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_scale": "qscale_act", "model.layers": "layers",
}  # fmt: skip


def test_mistrals_own_layout(tmp_path: Path) -> None:
    """``params.json`` says how weights are stored, and rows of queries and keys come in another order."""
    suite = Mistral()
    checkpoint = suite.make_checkpoint(tmp_path / "transformers")
    config, tensors = checkpoint.reference.config, {}
    for name, tensor in load_file(checkpoint.path / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = torch.arange(tensor.shape[0]).view(-1, 2, config.head_dim // 2)
            tensor = tensor.view(torch.uint8)[rows.transpose(1, 2).flatten()].view(tensor.dtype)
        for theirs, own in MISTRALS_NAMES.items():
            name = name.replace(theirs, own)
        tensors[name] = tensor
    params = {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size, "rope_theta": config.rope_parameters["rope_theta"],
        "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    }  # fmt: skip
    (tmp_path / "params.json").write_text(json.dumps(params))
    save_file(tensors, tmp_path / "consolidated.safetensors")
    prompt = suite.prompt(suite.prompt_len)
    logits = PagedDriver(suite.open(tmp_path)).step({"a": prompt})
    suite.assert_close(logits, checkpoint.logprobs(prompt))


def test_while_loading(tmp_path: Path) -> None:
    """A plain checkpoint, rounded to E4M3 with a scale for each output."""
    suite = TestCompressedChannels()
    checkpoint = ModelConformance.make_checkpoint(suite, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    state = checkpoint.reference.state_dict()
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scales = tensor.abs().amax(1, keepdim=True) / 448
            state[name] = (tensor / scales).to(torch.float8_e4m3fn).float() * scales
    checkpoint.reference.load_state_dict(state)
    info = suite.resolve(tmp_path, max_model_len=64)
    context = build_context(info)
    method = quant_method(info, "fp8", context.ops, device="cpu")
    model = load_model(info, dataclasses.replace(context, quant=method))
    prompt = suite.prompt(20)
    suite.assert_close(PagedDriver(model).step({"a": prompt}), checkpoint.logprobs(prompt))
