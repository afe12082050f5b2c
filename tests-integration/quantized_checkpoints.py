"""Models of quantized checkpoints beside transformers' models of what they mean: for tests of formats."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from families import FAMILIES, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import Built, load_model
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_models.weight_bytes import kept_bytes
from headrace_testing.model.decoders import (
    Checkpoint,
    ModelConformance,
    PagedDriver,
    build_context,
)
from headrace_testing.model.quantized_layers import gptq_tensors

DENSE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    **DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


def fp4(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K], scales [N, groups] -> codes uint8 [N, K / 2] and what they mean."""
    wide = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    codes = torch.cat([
        (rows[..., None] / own[..., None] - E2M1).abs().argmin(-1)
        for rows, own in zip(weight.split(16), wide.split(16), strict=True)
    ])  # fmt: skip
    return (codes[:, ::2] | codes[:, 1::2] << 4).byte(), E2M1[codes] * wide


def check_whole(suite: ModelConformance, folder: Path) -> Checkpoint:
    """The numbers of one whole model, without the rest of the suite: batched, in chunks, after a preemption
    and over two ranks."""
    made = suite.make_checkpoint(folder)
    model = suite.open(made.path)
    suite.test_requests_of_different_lengths(made, model)
    suite.test_prefill_in_chunks(made, model)
    suite.test_preemption(made, model)
    if suite.tensor_parallel > 1:
        suite.test_tensor_parallel(made, model)
    return made


def save_gptq(folder: Path, family: str = "llama", **changes: Any) -> None:
    """A family of ``families.py`` in 4 bits, groups of 32 inputs.

    Args:
        changes: of its config: each layer needs a multiple of 32 inputs.
    """
    kind, sizes = FAMILIES[family]
    save_model(family, folder, {family: (kind, {**sizes, **changes})})
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = tensor
            continue
        tensors, _ = gptq_tensors(
            tensor, bits=4, group_size=32, symmetric=True, by_importance=False
        )
        stored |= {f"{module}.{suffix}": part for suffix, part in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def divide(path: Path, into: Path) -> None:
    """Write a checkpoint of one file again, as three."""
    tensors = load_file(path / "model.safetensors")
    for file in path.glob("*.json"):
        (into / file.name).write_bytes(file.read_bytes())
    names, where = sorted(tensors), {}
    for index in range(3):
        file_name = f"model-{index + 1:05}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names[index::3]}, into / file_name)
        where |= dict.fromkeys(names[index::3], file_name)
    index_file = into / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": where}))


class IntegerConformance(ModelConformance):
    """The suite of every family, with integers and what they mean."""

    quantization: ClassVar[dict[str, Any]]
    scales: ClassVar[str] = "scales"
    """Suffix of the tensor that :meth:`test_scales_count` turns."""
    side_file: ClassVar[str | None] = None
    """The config's block is in this file, and not in config.json."""
    tolerance: ClassVar[float] = 1e-3
    least_error: ClassVar[float] = 1e-2
    """Largest error of a log-probability that wrong scales make, at least."""

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A layer's tensors by suffix, and the weight that they mean."""
        raise NotImplementedError

    adds_tensors: ClassVar[bool] = True
    """A packed layer has more tensors than one in floats."""
    layers: ClassVar[str] = r".*_proj"
    """Pattern of the names of linear layers."""
    refusal: ClassVar[str] = ""
    """Words of the message that refuses two ranks, where ``tensor_parallel`` is 1."""
    is_transposed: ClassVar[bool] = False
    """The plain checkpoint stores them [in, out]; quantizers turn them first."""

    def coded(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """As :meth:`module`, of a weight as the plain checkpoint stores it."""
        if not self.is_transposed:
            return self.module(name, weight)
        tensors, meant = self.module(name, weight.T.contiguous())
        if tensors.keys() == {"weight"} and tensors["weight"].is_floating_point():
            return {"weight": weight}, weight
        return tensors, meant.T.contiguous()

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        super().make_checkpoint(folder, seed, **overrides)
        stored, floats = {}, {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            stored[name] = floats[name] = tensor
            if re.fullmatch(rf"{self.layers}\.weight", name):
                tensors, floats[name] = self.coded(name.removesuffix(".weight"), tensor)
                del stored[name]
                stored |= {name.removesuffix("weight") + key: t for key, t in tensors.items()}
        assert len(stored) > len(floats) or not self.adds_tensors
        save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
        reference = self.hf_class().from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        if self.side_file is None:
            config["quantization_config"] = self.quantization
            (folder / "config.json").write_text(json.dumps(config))
        else:
            (folder / self.side_file).write_text(json.dumps(self.quantization))
        return Checkpoint(reference.eval(), folder)

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return resolve(ModelConfig(model=str(path), **settings), LoadConfig(), CpuPlatform())

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        method = quant_method(info, None, context.ops, device=context.device)
        context = dataclasses.replace(context, quant=method)
        return load_model(info, context, load=LoadConfig(**settings))

    def test_linear_layers_are_stored_as_quantization_says(self, checkpoint: Checkpoint) -> None:
        """Packed: the model takes little more than the files' tensors."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len, dtype="bfloat16")
        context = build_context(info)
        plain = kept_bytes(Built.of(info, context).model, info.dtype)
        method = quant_method(info, None, context.ops, device=context.device)
        context = dataclasses.replace(context, quant=method)
        assert kept_bytes(Built.of(info, context).model, info.dtype) < 0.75 * plain

    def test_sharded_checkpoint_equals_single(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        """A layer's tensors may lie in several files."""
        divide(checkpoint.path, tmp_path)
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    def test_tensor_of_wrong_dtype(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        def change(tensors: dict[str, Tensor], name: str) -> None:
            tensors[name] = tensors[name].short()

        name = self._rewrite(checkpoint, tmp_path, change)
        self._assert_refused(tmp_path, name, "model.safetensors", "int16")

    def test_scales_count(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        """Scales turned by one place make another model."""
        tensors = load_file(checkpoint.path / "model.safetensors")
        for name in tensors:
            if name.endswith((f"down_proj.{self.scales}", f"mlp.c_proj.{self.scales}")):
                tensors[name] = tensors[name].flatten().roll(1).view(tensors[name].shape)
        for file in checkpoint.path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        prompt = self.prompt(12)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        error = torch.log_softmax(logits, -1) - checkpoint.logprobs(prompt)
        assert float(error.abs().max()) > self.least_error


class PackedCheckpoint(IntegerConformance):
    """All layers but one in one format."""

    scales = "weight_scale"
    plain: ClassVar[str] = "0.self_attn.v_proj"
    """End of the name of the layer in floats."""

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return ({"weight": weight}, weight) if name.endswith(self.plain) else self.packed(weight)

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        raise NotImplementedError


class Dense:
    def hf_class(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(**{**DENSE, **overrides})


class Mixture:
    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import Qwen3MoeForCausalLM

        return Qwen3MoeForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(**{**MIXTURE, **overrides})


class Conv1D:
    """GPT-2, whose plain checkpoint stores weights transposed."""

    layers = r".*\.c_(attn|fc|proj)"
    is_transposed = True

    def hf_class(self) -> Any:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GPT2Config

        own = {"vocab_size": 160, "n_embd": 128, "n_inner": 192, "n_layer": 2, "n_head": 4,
               "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
        return GPT2Config(**{**own, **overrides})


class FusedModules:
    """Query, key and value are one module in the checkpoint, and so are gate and up."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import Phi3ForCausalLM

        return Phi3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Phi3Config

        return Phi3Config(**{**DENSE, **overrides})
