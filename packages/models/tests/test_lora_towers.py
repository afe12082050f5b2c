"""Adapters of towers for media and of their projectors, beside PEFT on the same files, in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import test_qwen2_audio as audio
import test_vision_emu3 as emu3
import test_vision_gemma3 as gemma3
import test_vision_language as vision
import torch
from adapter_files import choose, with_adapters
from torch import Tensor
from vision_conformance import VisionConformance

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.lora.adapters import Adapters
from headrace_models.resolve import resolve
from headrace_testing.model.adapters import write_adapter
from headrace_testing.model.decoders import build_context, randomise

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT, about what it stores


class Qwen2Audio(VisionConformance):
    """Clips stand for the suite's images."""

    counts = (48, 29)

    def hf_class(self) -> Any:
        return audio.TestText().hf_class()

    def hf_config(self) -> Any:
        return audio.TestText().hf_config()

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [audio.heard(audio.spectrogram(i), count) for i, count in enumerate(self.counts)]

    def embed(self, model: Any, images: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        with torch.inference_mode():
            return list(model.embed_media("audio", images))

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        clips = [(audio.spectrogram(i), count) for i, count in enumerate(self.counts)]
        found: Tensor = audio.logprobs(reference, tokens, clips)
        return found


CASES: dict[str, VisionConformance] = {
    "llava": vision.TestLlavaClip(),
    "qwen2_vl": vision.TestQwen2VL(),
    "qwen2_5_vl": vision.TestQwen2_5VL(),
    "gemma3": gemma3.TestGemma3(),
    "qwen2_audio": Qwen2Audio(),
}


def reference(case: VisionConformance, folder: Path) -> Any:
    """transformers' model, and a checkpoint of it."""
    torch.manual_seed(0)
    made = case.hf_class()(case.hf_config()).eval()
    randomise(made)
    case.save(made, folder)
    return made


def opened(
    folder: Path, *, towers: bool = True, native: bool = False, **slots: int
) -> tuple[Any, Adapters]:
    """The checkpoint's model with its towers, and slots."""
    info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
    info = dataclasses.replace(info, processor=info.architecture)
    ops = bind_ops(KernelNeed(device="cpu", dtype="float32")) if native else None
    context, adapters = with_adapters(
        build_context(info, **({} if ops is None else {"ops": ops})),
        most=200,
        towers=towers,
        **slots,
    )
    return load_model(info, context), adapters


def add(model: Any, folder: Path, seed: int, targets: str | list[str]) -> Any:
    """Write an adapter of random numbers by PEFT, whose model comes back."""
    config = peft.LoraConfig(init_lora_weights=False, r=4, lora_alpha=2, target_modules=targets)
    made = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, factor in made.named_parameters():
            if ".lora_" in name:
                factor.copy_(
                    torch.randn(factor.shape, generator=generator) / factor.shape[-1] ** 0.5
                )
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_peft(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    base = reference(case, tmp_path / "base")
    model, slots = opened(tmp_path / "base")
    images = case.images()
    plain = case.embed(model, images)
    tokens, offsets = case.prompt([len(v) for v in plain])
    without = case.logprobs(base, tokens, images)
    made = add(base, tmp_path / "adapter", 1, "all-linear")
    expected = case.logprobs(made, tokens, images)
    made.unload()
    read = slots.read(str(tmp_path / "adapter"))
    assert read.changes_media
    slots.place(1, read)

    slots.choose_media(1)
    choose(slots, [1] * len(tokens))
    found = case.forward(model, tokens, offsets, images, [len(tokens)])
    adapted = case.embed(model, images)
    slots.choose_media(None)
    slots.choose(None)
    assert float((expected - without).abs().max()) > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for own, other, again in zip(plain, adapted, case.embed(model, images), strict=True):
        assert float((own - other).abs().max()) > 1e-2
        assert torch.equal(own, again)
    torch.testing.assert_close(
        case.forward(model, tokens, offsets, images, [len(tokens)]), without, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("name", CASES)
def test_without_the_option_it_is_refused_by_name(tmp_path: Path, name: str) -> None:
    base = reference(CASES[name], tmp_path / "base")
    _, slots = opened(tmp_path / "base", towers=False)
    add(base, tmp_path / "adapter", 1, "all-linear").unload()
    with pytest.raises(UnsupportedModel, match=r"tower|visual") as raised:
        slots.read(str(tmp_path / "adapter"))
    assert "--enable-tower-connector-lora" in str(raised.value)
    slots.choose_media(None)


def test_one_of_text_changes_no_media(tmp_path: Path) -> None:
    base = reference(CASES["llava"], tmp_path / "base")
    _, slots = opened(tmp_path / "base")
    add(base, tmp_path / "adapter", 1, r".*language_model.*(q|v)_proj").unload()
    assert not slots.read(str(tmp_path / "adapter")).changes_media


def test_convolutions_and_tables_are_refused_by_name(tmp_path: Path) -> None:
    base = reference(CASES["qwen2_vl"], tmp_path / "base")
    _, slots = opened(tmp_path / "base")
    add(base, tmp_path / "adapter", 1, ["proj"]).unload()
    with pytest.raises(UnsupportedModel, match=r"patch_embed\.proj.*convolutions"):
        slots.read(str(tmp_path / "adapter"))
    base = reference(CASES["llava"], tmp_path / "other")
    _, slots = opened(tmp_path / "other")
    add(base, tmp_path / "table", 1, ["position_embedding"]).unload()
    with pytest.raises(UnsupportedModel, match=r"vision_tower.*position_embedding"):
        slots.read(str(tmp_path / "table"))


@pytest.mark.parametrize("towers", [False, True])
def test_a_table_whose_rows_are_in_images_is_refused(tmp_path: Path, towers: bool) -> None:
    """Emu3's images are tokens: with a request's adapter of the table their vectors would be others."""
    base = reference(emu3.TestEmu3(), tmp_path / "base")
    _, slots = opened(tmp_path / "base", towers=towers)
    add(base, tmp_path / "adapter", 1, ["embed_tokens"]).unload()
    with pytest.raises(
        UnsupportedModel, match=r"embed_tokens \(rows of it are in vectors of images"
    ):
        slots.read(str(tmp_path / "adapter"))


def test_rows_are_those_of_the_item_alone(tmp_path: Path) -> None:
    """An item's vectors are the same bits alone and beside others, and each slot's are its own.

    The reference promises no such thing, and this package's own environment has nothing else: products of
    torch sum up in another order for another number of rows on some processors. The kernels are held to it at
    each instruction set by their own test_items_apart.
    """
    if not bind_ops(KernelNeed(device="cpu", dtype="float32")).row_invariant:
        pytest.skip("the native kernels are not installed here")
    case = CASES["qwen2_5_vl"]
    base = reference(case, tmp_path / "base")
    model, slots = opened(tmp_path / "base", native=True, max_loras=2)
    for slot in (0, 1):
        add(base, tmp_path / str(slot), slot, "all-linear").unload()
        slots.place(slot, slots.read(str(tmp_path / str(slot))))
    images, seen = case.images(), []
    for slot in (None, 0, 1):
        slots.choose_media(slot)
        together = case.embed(model, images)
        for image, own in zip(images, together, strict=True):
            assert torch.equal(case.embed(model, [image])[0], own)
        seen.append(together[0])
    slots.choose_media(0)
    assert torch.equal(case.embed(model, images)[0], seen[1])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((seen[one] - seen[other]).abs().max()) > 1e-2


def test_models_without_towers_refuse_the_option(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**vision.TEXT)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="enable_tower_connector_lora = True: must be False"):
        opened(tmp_path)


def test_what_lies_behind_the_layer_that_is_read_changes_nothing(tmp_path: Path) -> None:
    """LLaVA reads the states before the last layer; adapters of all linear layers have that layer's, too."""
    reference(CASES["llava"], tmp_path / "base")
    _, slots = opened(tmp_path / "base")
    name = "model.vision_tower.vision_model.encoder.layers.{}.self_attn.q_proj"
    write_adapter(tmp_path / "both", {name.format(i): (36, 36) for i in (0, 2)})
    assert len(slots.read(str(tmp_path / "both")).pieces) == 1
    write_adapter(tmp_path / "unknown", {name.format(i): (36, 36) for i in (0, 7)})
    with pytest.raises(UnsupportedModel, match=r"layers\.7"):
        slots.read(str(tmp_path / "unknown"))
