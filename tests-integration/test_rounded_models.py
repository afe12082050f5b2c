"""Checkpoints of floats that are rounded while they are loaded are transformers' models with the weights that
the codes stand for: alone, batched, chunked, preempted, over two ranks, and in mixtures of experts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from quantized_checkpoints import DENSE, Conv1D, Dense, Mixture, check_whole, divide
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec, QuantMethod
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
    run_ranks,
)

HEAD = "lm_head"
CUT_BY_INPUT = re.compile(r".*\.(o_proj|down_proj|c_proj)")
"""Names of layers whose inputs are cut over ranks."""


class RoundedConformance(ModelConformance):
    """The suite of every family, with a method that rounds floats, and transformers' model with what is left
    of them."""

    tolerance = 1e-3
    method: ClassVar[str]
    layers: ClassVar[str] = r".*_proj"
    """Pattern of the names of linear layers, the head aside."""
    is_transposed: ClassVar[bool] = False
    """The checkpoint stores them [in, out]."""
    leaves: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of linear layers that the method leaves in floats."""
    coarse: ClassVar[float]
    """Largest error of a row of a rounded weight, over the row, both as Euclidean norms."""

    def quant(self, info: ModelInfo, context: BuildContext) -> QuantMethod:
        """Activations stay as they are: how they are rounded is another test's affair."""
        return quant_method(
            info, self.method, context.ops, device=context.device, activations="float"
        )

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        settings = {"dtype": "float32", **settings}
        return resolve(ModelConfig(model=str(path), **settings), LoadConfig(), CpuPlatform())

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        context = dataclasses.replace(context, quant=self.quant(info, context))
        return load_model(info, context, load=LoadConfig(**settings))

    def rounded(self, quant: QuantMethod, name: str, weight: Tensor, ranks: int) -> Tensor:
        """The weight [N, K] that a layer multiplies with, each rank having rounded its own share of it."""
        if ranks > 1 and CUT_BY_INPUT.fullmatch(name):
            return torch.cat([self.rounded(quant, name, w, 1) for w in weight.chunk(ranks, 1)], 1)
        spec = LinearSpec(name, weight.shape[1], (len(weight),), "float32")
        layer = quant.for_layer(spec)
        state = layer.finish(spec, {"weight": weight.clone()})
        return layer.apply(state, torch.eye(weight.shape[1])).T.contiguous()

    def reference(self, folder: Path, ranks: int = 1) -> Any:
        """transformers' model with rounded weights; the folder keeps the floats."""
        info = self.resolve(folder, max_model_len=self.max_model_len)
        quant = self.quant(info, build_context(info))
        file = folder / "model.safetensors"
        plain, floats = load_file(file), {}
        for name, tensor in plain.items():
            floats[name] = tensor
            module = name.removesuffix(".weight")
            if re.fullmatch(self.layers, module) and module != name:
                weight = tensor.T.contiguous() if self.is_transposed else tensor
                found = self.rounded(quant, module, weight, ranks)
                self.check_rounding(module, weight, found)
                floats[name] = found.T.contiguous() if self.is_transposed else found
        save_file(floats, file, metadata={"format": "pt"})
        made = self.hf_class().from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        save_file(plain, file, metadata={"format": "pt"})
        # A tied head is rounded, and the table is not.
        head = made.get_output_embeddings()
        whole = self.rounded(quant, HEAD, head.weight.detach().clone(), 1)
        head.weight = torch.nn.Parameter(whole)
        return made.eval()

    def check_rounding(self, name: str, weight: Tensor, found: Tensor) -> None:
        """Something is lost, and not too much: a suite that rounds nothing, or to noise, proves nothing."""
        error = (found - weight).norm(dim=1) / weight.norm(dim=1)
        if name.endswith(self.leaves or ("-",)):
            assert not error.any(), name
            return
        assert 0.001 * self.coarse < float(error.max()) <= self.coarse, (name, float(error.max()))

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        super().make_checkpoint(folder, seed, **overrides)
        return Checkpoint(self.reference(folder), folder)

    def test_linear_layers_are_stored_as_quantization_says(self, checkpoint: Checkpoint) -> None:
        """Packed: the model takes little more than its codes."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len, dtype="bfloat16")
        context = build_context(info)
        plain = kept_bytes(Built.of(info, context).model, info.dtype)
        context = dataclasses.replace(context, quant=self.quant(info, context))
        assert kept_bytes(Built.of(info, context).model, info.dtype) < 0.85 * plain

    def test_tensor_parallel(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        """Where groups end with a rank's inputs the numbers are those of one rank; a scale of a whole row is
        that of a rank's share of it."""
        prompt = self.prompt(self.prompt_len)
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        expected = Checkpoint(self.reference(checkpoint.path, 2), checkpoint.path).logprobs(prompt)

        def work(group: Any) -> Tensor:
            part = self.load(info, build_context(info, communicator=group))
            return PagedDriver(part).step({"a": prompt})

        for logits in run_ranks(2, work):
            self.assert_close(logits, expected)

    def test_sharded_checkpoint_equals_single(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        divide(checkpoint.path, tmp_path)
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    def test_other_weights_show(self, checkpoint: Checkpoint) -> None:
        """What the plain checkpoint makes is further away than the tolerance: rounding happened."""
        plain = self.hf_class().from_pretrained(
            checkpoint.path, attn_implementation="eager", dtype=torch.float32
        )
        prompt = self.prompt(12)
        error = Checkpoint(plain.eval(), checkpoint.path).logprobs(prompt)
        error = error - checkpoint.logprobs(prompt)
        assert float(error.abs().max()) > 5 * self.tolerance


class Wide:
    """Rows of whole blocks of 256 inputs, on each of two ranks, too."""

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LlamaConfig

        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
        return LlamaConfig(**{**DENSE, **sizes, **overrides})

    def hf_class(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM


class WideMixture(Mixture):
    def hf_config(self, **overrides: Any) -> Any:
        sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "head_dim": 128}
        return super().hf_config(**{**sizes, **overrides})


class TestInt8(Dense, RoundedConformance):
    """``int8`` as it is by default: activations in int8, too, which transformers' model rounds as well.

    A sum in another order may round an activation to the next integer: that bounds the tolerance.
    """

    method = "int8"
    coarse = 0.013
    tolerance = 0.12
    flips_ties = False
    test_tensor_parallel: ClassVar[None] = None  # a rank rounds its own share of a token
    test_other_weights_show: ClassVar[None] = None  # see test_activations_are_rounded

    def quant(self, info: ModelInfo, context: BuildContext) -> QuantMethod:
        return quant_method(info, self.method, context.ops, device=context.device)

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        for name, module in made.reference.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, inputs: (self.entered(inputs[0]),))
        return made

    def entered(self, x: Tensor) -> Tensor:
        """x [..., K] in 255 equal steps of its largest magnitude."""
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).round() * step

    def test_activations_are_rounded(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        """Without rounding them transformers' model is further away."""
        prompt = self.prompt(12)
        logits = PagedDriver(model).step({"a": prompt}).log_softmax(-1)
        near = float((logits - checkpoint.logprobs(prompt)).abs().mean())
        exact = Checkpoint(self.reference(checkpoint.path), checkpoint.path).logprobs(prompt)
        assert near < 0.1 * float((logits - exact).abs().mean())


METHODS: dict[str, tuple[float, bool]] = {
    "int8_weight_only": (0.013, False), "int4": (0.2, False), "int4_g32": (0.13, False),
    "nf4": (0.13, False), "bitsandbytes": (0.13, False), "fp4": (0.18, False), "mxfp4": (0.17, False),
    "fp8": (0.035, False), "q8_0": (0.009, True), "q4_0": (0.13, True), "q4_k": (0.12, True),
    "q5_k": (0.06, True), "q6_k": (0.03, True),
}  # fmt: skip
"""Method -> the largest error of a row, and whether blocks are as long as 256 inputs."""
OF_EXPERTS = {"int8": (0.013, False), "experts_int8": (0.013, False), **METHODS}


def plain_suite(method: str) -> type[RoundedConformance]:
    """The suite of a method, in a model without experts."""
    coarse, is_wide = METHODS[method]
    name = "Test" + method.title().replace("_", "")
    members = {"method": method, "coarse": coarse, "__module__": __name__}
    return type(name, (Wide if is_wide else Dense, RoundedConformance), members)


def mixture_suite(method: str) -> type[RoundedConformance]:
    """The suite of a method, in a mixture of experts; pytest does not collect it."""
    coarse, is_wide = OF_EXPERTS[method]
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj") if method == "experts_int8" else ()
    members = {"method": method, "coarse": coarse, "leaves": leaves}
    return type(method, (WideMixture if is_wide else Mixture, RoundedConformance), members)


SUITES = {method: plain_suite(method) for method in METHODS if method != "bitsandbytes"}
globals().update({suite.__name__: suite for suite in SUITES.values()})  # for pytest
SUITES["bitsandbytes"] = SUITES["nf4"]  # another name
SUITES["int8"] = TestInt8


class TestStoredTransposed(Conv1D, RoundedConformance):
    """GPT-2: weights are turned before they are rounded."""

    method = "int4_g32"
    coarse = 0.2


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize("method", OF_EXPERTS)
def test_experts(method: str, tmp_path: Path) -> None:
    check_whole(mixture_suite(method)(), tmp_path)


def test_experts_alone_need_experts(tmp_path: Path) -> None:
    suite = plain_suite("int8_weight_only")()
    ModelConformance.make_checkpoint(suite, tmp_path)
    info = suite.resolve(tmp_path, max_model_len=64)
    context = build_context(info)
    method = quant_method(info, "experts_int8", context.ops, device="cpu")
    with pytest.raises(ConfigError, match=r"'experts_int8'.*no experts"):
        load_model(info, dataclasses.replace(context, quant=method))


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("method", ["nf4", "mxfp4", "int4_g32", "q4_k", "fp8"])
def test_overrides_make_fused_layers_of_other_types(method: str, tmp_path: Path) -> None:
    """Layers of one method beside those of another; query, key and value of one layer agree."""
    suite = plain_suite(method)()
    ModelConformance.make_checkpoint(suite, tmp_path)
    info = suite.resolve(tmp_path, max_model_len=64)
    context = build_context(info)
    overrides = {r"re:.*\.0\..*_proj": "int8_weight_only", "re:.*down_proj": "none"}
    mixed = quant_method(info, method, context.ops, device="cpu", overrides=overrides)
    suite.quant = lambda info, context: mixed  # type: ignore[method-assign]
    suite.check_rounding = lambda *_: None  # type: ignore[method-assign]
    reference = Checkpoint(suite.reference(tmp_path), tmp_path)
    prompt = suite.prompt(20)
    suite.assert_close(
        PagedDriver(suite.load(info, context)).step({"a": prompt}), reference.logprobs(prompt)
    )
