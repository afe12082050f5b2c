"""What is refused of an adapter's folder, and of modules; each by name, with what would be accepted."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import choose, with_adapters
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError, HeadraceError, UnsupportedModel, WeightsError
from headrace_core.model import CausalLM
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.lora import files
from headrace_models.lora.adapters import Adapters
from headrace_models.resolve import resolve
from headrace_models.stages.stage import Stage
from headrace_testing.model.adapters import linear_modules, merged, write_adapter
from headrace_testing.model.decoders import (
    Checkpoint,
    PagedDriver,
    build_context,
    randomise,
    run_ranks,
)

TINY: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPT = [5, 9, 3, 7, 8]
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    model = LlamaForCausalLM(LlamaConfig(**TINY, attn_implementation="eager")).float().eval()
    randomise(model)
    model.save_pretrained(folder)
    return Checkpoint(model, folder)


def opened(base: Checkpoint, communicator: Communicator | None = None) -> tuple[CausalLM, Adapters]:
    info = resolve(ModelConfig(model=str(base.path), max_model_len=64), LoadConfig(), CpuPlatform())
    context, slots = with_adapters(build_context(info, communicator=communicator))
    return load_model(info, context), slots


@pytest.fixture(scope="module")
def slots(base: Checkpoint) -> Adapters:
    return opened(base)[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter that is accepted."""
    write_adapter(tmp_path, {Q: (48, 48)})
    return tmp_path


def state(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def store(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, r"peft_type = 'IA3': must be 'LORA'"),
        ({"bias": "all"}, r"bias = 'all': must be 'none'"),
        ({"bias": "lora_only"}, "bias"),
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["score"]}, r"modules_to_save = \['score'\]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": 0}, "r = 0: must be an integer from 1"),
        ({"r": True}, "r = True"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan: must be a number"),
        ({"use_rslora": 1}, "use_rslora = 1: must be true or false"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern = .*must be an object"),
        ({"rank_pattern": {"q_proj": "8"}}, r"rank_pattern\['q_proj'\] = '8'"),
        ({"alpha_pattern": {"(": 8}}, "alpha_pattern = '.': must be regular expressions"),
        ({"rank_pattern": {"(a+)+b": 8}}, "none of a group"),
        ({"rank_pattern": {".*.*.*": 8}}, "2 repetitions"),
        ({"target_parameters": "gate_up_proj"}, "target_parameters = .*must be a list of names"),
        ({"r": 3}, r"rank must be 3, as r or rank_pattern"),
    ],
)
def test_settings_that_are_refused(
    slots: Adapters, folder: Path, settings: dict[str, Any], words: str
) -> None:
    assert slots.read(str(folder)).num_bytes == 2 * 4 * 4 * 48
    state(folder, **settings)
    with pytest.raises((UnsupportedModel, WeightsError), match=words) as caught:
        slots.read(str(folder))
    assert str(folder) in str(caught.value)


def renamed(end: str, name: str) -> Callable[[dict[str, Tensor]], Any]:
    """Give the tensor with this end another name."""

    def change(tensors: dict[str, Tensor]) -> None:
        old = next(n for n in tensors if n.endswith(end))
        tensors[name] = tensors.pop(old)

    return change


def added(name: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({f"base_model.model.{name}": torch.zeros(shape)})


def twice(tensors: dict[str, Tensor]) -> None:
    """The same module in two spellings."""
    for name, tensor in list(tensors.items()):
        tensors[name.replace(".model.model.", ".model.")] = tensor.clone()


def as_table(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        factor = tensors.pop(name)
        tensors[name.replace("lora_", "lora_embedding_").removesuffix(".weight")] = factor


def with_nan(tensors: dict[str, Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def without_a(tensors: dict[str, Tensor]) -> None:
    del tensors[next(name for name in tensors if name.endswith("lora_A.weight"))]


def as_in_training(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)


def as_integers(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].int()


def cut(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if name.endswith("lora_B.weight"):
            tensors[name] = tensors[name][:-1].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            renamed("lora_B.weight", "base_model.model.x.lora_B.weight"),
            "one of the factors .* is missing",
        ),
        (lambda tensors: tensors.popitem(), "one of the factors|not supported"),
        (renamed("lora_A.weight", "base_model.model.x.lora_A.weight"), "one of the factors"),
        (without_a, "lora_B.weight, without its lora_A: not supported"),
        (as_in_training, "named as in state_dict.*save_pretrained"),
        (added("lm_head.weight", 131, 48), "modules_to_save"),
        (added(f"{Q}.lora_magnitude_vector", 48), "DoRA: not supported; accepted are factors"),
        (added(f"{Q}.lora_B.bias", 48), "lora_bias"),
        (added("lm_head.base_layer.weight", 140, 48), r"\[140, 48\] .*the model's is \[131, 48\]"),
        (twice, "come twice, under two names"),
        (as_table, "must be lora_embedding_A and lora_embedding_B if it is a table"),
        (with_nan, "1 NaN"),
        (as_integers, "dtype torch.int32: must be float32"),
        (cut, r"\[47, 48\] \[out, in\], the model's is \[48, 48\]"),
    ],
)
def test_tensors_that_are_refused(
    slots: Adapters, folder: Path, change: Callable[[dict[str, Tensor]], Any], words: str
) -> None:
    store(folder, change)
    with pytest.raises((UnsupportedModel, WeightsError), match=words) as caught:
        slots.read(str(folder))
    assert str(folder / "adapter_model.safetensors") in str(caught.value)


@pytest.mark.parametrize(
    ("modules", "rank", "words"),
    [
        ({Q: (48, 47)}, 4, r"\[48, 47\] \[out, in\], the model's is \[48, 48\]"),
        ({Q: (48, 48)}, 9, "rank 9: must be at most max_lora_rank = 8"),
        ({"model.layers.0.self_attn.r_proj": (48, 48)}, 4, "no place in this model"),
        ({Q: (1 << 17, 48)}, 4, r"\[131072, 48\] \[out, in\]: no module of the model is so large"),
        ({Q: (48, 48), "model.layers.1.mlp.up_proj": (80, 44)}, 4, "up_proj.*the model's is"),
    ],
)
def test_shapes_are_checked_before_numbers_are_read(
    slots: Adapters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    modules: dict[str, tuple[int, int]],
    rank: int,
    words: str,
) -> None:
    """By the file's header alone."""
    write_adapter(tmp_path, modules, rank)
    monkeypatch.setattr(files, "read_tensors", lambda *_: pytest.fail("numbers were read"))
    with pytest.raises((UnsupportedModel, WeightsError), match=words):
        slots.read(str(tmp_path))


def test_modules_without_a_place_are_named(slots: Adapters, tmp_path: Path) -> None:
    write_adapter(tmp_path, {f"model.layers.{i}.self_attn.r_proj": (48, 48) for i in range(20)})
    with pytest.raises(UnsupportedModel) as caught:
        slots.read(str(tmp_path))
    message = str(caught.value)
    assert "no place in this model for model.layers.0.self_attn.r_proj" in message
    assert "and 10 more" in message
    assert (
        "there are places for lm_head, model.embed_tokens, model.layers.N.mlp.down_proj" in message
    )


def test_rank_above_the_largest(slots: Adapters, tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: (48, 48)}, rank=9)
    with pytest.raises(UnsupportedModel, match="rank 9: must be at most max_lora_rank = 8"):
        slots.read(str(tmp_path))


class _Runs:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def test_a_pickle_that_runs_code(slots: Adapters, folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(
        pickle.dumps({"x": _Runs(folder / "ran")}, protocol=2)
    )
    with pytest.raises(WeightsError, match=r"adapter_model\.bin: not read"):
        slots.read(str(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, (1 << 62).to_bytes(8, "little") + b"{}", b"[" * 200]
)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_files_that_are_none(slots: Adapters, folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(HeadraceError, match=name):
        slots.read(str(folder))


def test_folders_without_files(slots: Adapters, folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"is missing.*adapter_model\.bin, adapter_model\.pt"):
        slots.read(str(folder))
    with pytest.raises(UnsupportedModel, match=r"adapter_config\.json: not found: .*an adapter"):
        slots.read(str(folder / "absent"))


def test_equal_content_has_one_digest(slots: Adapters, folder: Path, tmp_path: Path) -> None:
    first = slots.read(str(folder)).digest
    state(folder, task_type="CAUSAL_LM", lora_dropout=0.1)
    assert slots.read(str(folder)).digest == first
    state(folder, lora_alpha=7)
    assert slots.read(str(folder)).digest != first


def test_factors_have_the_activations_dtype(base: Checkpoint) -> None:
    settings = ModelConfig(model=str(base.path), max_model_len=64, dtype="bfloat16")
    info = resolve(settings, LoadConfig(), CpuPlatform())
    context, slots = with_adapters(build_context(info))
    slots.dtype = "float32"
    with pytest.raises(
        ConfigError, match=r"lora_dtype = 'float32': must be the activations', 'bfloat16'"
    ):
        load_model(info, context)


def test_rows_that_no_slots_were_chosen_for(base: Checkpoint, folder: Path) -> None:
    """Never another row's slot."""
    model, slots = opened(base)
    slots.place(0, slots.read(str(folder)))
    for others in (4, 6):
        choose(slots, [0] * others)
        with pytest.raises(RuntimeError, match=f"5 rows, and slots .* chosen for {others} tokens"):
            PagedDriver(model).step({"a": PROMPT})
    with pytest.raises(ValueError, match="slots of 65 tokens: at most 64"):
        choose(slots, [0] * 65)
    with pytest.raises(IndexError, match="slot 2 of 2"):
        slots.place(2, slots.read(str(folder)))


def test_each_rank_keeps_its_pieces(base: Checkpoint, tmp_path: Path) -> None:
    """Outputs of column-parallel layers, and inputs of row-parallel ones, are cut as the base's are."""
    modules = {n: size for n, size in linear_modules(base.reference).items() if n != "lm_head"}
    terms = write_adapter(tmp_path, modules)

    def work(communicator: Communicator) -> Tensor:
        model, slots = opened(base, communicator)
        slots.place(1, slots.read(str(tmp_path)))
        choose(slots, [1] * len(PROMPT))
        return PagedDriver(model).step({"a": PROMPT}).log_softmax(-1)

    expected = Checkpoint(merged(base.reference, terms), tmp_path).logprobs(PROMPT)
    for found in run_ranks(2, work):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_slots_of_any_order_of_reading(base: Checkpoint, folder: Path, tmp_path: Path) -> None:
    """A slot forgets what it held, also where the next adapter has less."""
    model, slots = opened(base)
    names = {n: size for n, size in linear_modules(base.reference).items() if n != "lm_head"}
    write_adapter(tmp_path / "all", names, seed=1)
    whole, small = slots.read(str(tmp_path / "all")), slots.read(str(folder))
    slots.place(0, small)
    choose(slots, [0] * 5)
    expected = PagedDriver(model).step({"a": PROMPT})
    slots.place(0, whole)
    assert not torch.allclose(PagedDriver(model).step({"a": PROMPT}), expected, atol=1e-3)
    slots.place(0, small)
    assert torch.equal(PagedDriver(model).step({"a": PROMPT}), expected)
    assert slots.num_bytes == 4 * 2 * 8 * sum(
        p.place.slot.shape[1] * p.place.slot.num_parts + p.place.slot.shape[0]
        for p in {id(p.place): p for p in whole.pieces}.values()
    ) + 4 * 2 * 8 * (48 + 131)
    slots.choose(None)
    assert not slots.runs_eagerly
    plain = PagedDriver(model).step({"a": PROMPT}).log_softmax(-1)
    torch.testing.assert_close(plain, base.logprobs(PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_keeps_what_changes_its_own_layers(
    base: Checkpoint, tmp_path: Path, index: int
) -> None:
    """Both stages check all of it, and take it whatever of it is theirs."""
    info = resolve(ModelConfig(model=str(base.path), max_model_len=64), LoadConfig(), CpuPlatform())
    context, slots = with_adapters(build_context(info))
    load_model(info, dataclasses.replace(context, stage=Stage(index, 2)))
    second = "model.layers.1.mlp.down_proj"
    write_adapter(tmp_path / "both", {Q: (48, 48), second: (48, 60), "lm_head": (131, 48)})
    read = slots.read(str(tmp_path / "both"))
    own = {0: {Q, "lm_head"}, 1: {second}}[index]
    assert {piece.place.name.removesuffix(".qkv_proj") for piece in read.pieces} == {
        name.removesuffix(".q_proj") for name in own
    }
    for _ in range(2):
        slots.place(0, read)
    write_adapter(tmp_path / "other", {[second, Q][index]: (48, [60, 48][index])})
    assert not slots.read(str(tmp_path / "other")).pieces
    write_adapter(tmp_path / "wrong", {[second, Q][index]: (48, 47)})
    with pytest.raises(WeightsError, match="47"):
        slots.read(str(tmp_path / "wrong"))
    write_adapter(tmp_path / "unknown", {"model.layers.2.mlp.down_proj": (48, 60)})
    with pytest.raises(UnsupportedModel, match=r"no place in this model for .*layers\.2"):
        slots.read(str(tmp_path / "unknown"))
