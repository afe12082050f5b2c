"""Loading: what transformers' own files do not show."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_families as families
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core import plugins
from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.linear import LinearSpec, TensorSpec
from headrace_core.model import LoadProgress, ModelInfo
from headrace_core.parallel import Communicator
from headrace_models.formats.index import INDEX
from headrace_models.formats.safetensors import SafetensorsFormat
from headrace_models.loading.loader import load_model
from headrace_testing.model.decoders import (
    Checkpoint,
    PagedDriver,
    PlainQuant,
    build_context,
    run_ranks,
)

LLAMA, MIXTRAL, GPT2 = families.TestLlama(), families.TestMixtral(), families.TestGPT2()
PROMPT = LLAMA.prompt(20)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return MIXTRAL.make_checkpoint(tmp_path_factory.mktemp("mixtral"))


def copy(
    checkpoint: Checkpoint,
    folder: Path,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    change_config: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """The checkpoint in another folder, with its tensors or its config changed in place."""
    shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if change_config is not None:
        config = json.loads((folder / "config.json").read_text())
        change_config(config)
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits_of(suite: Any, path: Path) -> Tensor:
    return PagedDriver(suite.open(path)).step({"a": PROMPT})


class TestStrictness:
    def test_harmless_left_overs(self, llama: Checkpoint, tmp_path: Path) -> None:
        def add(tensors: dict[str, Tensor]) -> None:
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(9)
            tensors["model.layers.0.self_attn._extra_state"] = torch.ones(0)

        assert torch.equal(
            logits_of(LLAMA, copy(llama, tmp_path, add)), logits_of(LLAMA, llama.path)
        )

    def test_stored_copy_of_a_tied_head(self, tmp_path: Path) -> None:
        tied = LLAMA.make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)

        def add(tensors: dict[str, Tensor]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        both = copy(tied, tmp_path / "both", add)
        assert torch.equal(logits_of(LLAMA, both), logits_of(LLAMA, tied.path))

    def test_layer_that_the_config_does_not_have(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = copy(llama, tmp_path, change_config=lambda c: c.update(num_hidden_layers=2))
        with pytest.raises(
            WeightsError, match=r"model\.safetensors.*'model\.layers\.2\..*no layer"
        ):
            LLAMA.open(path)

    def test_many_missing_tensors_are_counted(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = copy(llama, tmp_path, change_config=lambda c: c.update(num_hidden_layers=5))
        with pytest.raises(WeightsError, match=r"'model\.layers\.3\..* and \d+ more"):
            LLAMA.open(path)

    def test_missing_part_of_a_fused_layer(self, llama: Checkpoint, tmp_path: Path) -> None:
        name = "model.layers.1.self_attn.k_proj.bias"
        path = copy(llama, tmp_path, lambda tensors: (tensors.pop(name), None)[1])
        with pytest.raises(WeightsError, match=rf"missing.*{name}"):
            LLAMA.open(path)

    def test_tensor_in_two_files(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = copy(llama, tmp_path)
        (path / "model.safetensors").rename(path / "a.safetensors")
        save_file({"model.norm.weight": torch.ones(72)}, path / "b.safetensors")
        with pytest.raises(
            WeightsError, match=r"b\.safetensors.*'model\.norm\.weight'.*twice.*a\.saf"
        ):
            LLAMA.open(path)

    def test_one_place_under_two_names(self, tmp_path: Path) -> None:
        gpt2 = GPT2.make_checkpoint(tmp_path / "gpt2")

        def add(tensors: dict[str, Tensor]) -> None:
            tensors["wte.weight"] = tensors["transformer.wte.weight"].clone()

        with pytest.raises(WeightsError, match=r"'wte\.weight'|'transformer\.wte\.weight'"):
            GPT2.open(copy(gpt2, tmp_path / "both", add))

    def test_float8_weight_without_a_method(self, llama: Checkpoint, tmp_path: Path) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            name = "model.layers.0.mlp.down_proj.weight"
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

        with pytest.raises(WeightsError, match=r"down_proj\.weight.*float8_e4m3fn.*float32"):
            LLAMA.open(copy(llama, tmp_path, change))

    def test_folder_without_weights(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = copy(llama, tmp_path)
        (path / "model.safetensors").unlink()
        with pytest.raises(WeightsError, match=r"no weights found.*safetensors"):
            LLAMA.open(path)
        info = LLAMA.resolve(path)
        with pytest.raises(ConfigError, match=r"'safetensors'.*holds no checkpoint"):
            LLAMA.load(info, build_context(info), load_format="safetensors")
        (path / "params.json").write_text("{}")
        with pytest.raises(WeightsError, match=r"no weights found.*--load-format mistral"):
            LLAMA.open(path)

    def test_file_cut_short_after_resolving(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = copy(llama, tmp_path)
        info = LLAMA.resolve(path, max_model_len=64)
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(WeightsError, match=r"model\.safetensors.*truncated"):
            LLAMA.load(info, build_context(info))


class TestLayouts:
    def test_gpt2_without_prefix_and_with_masks(self, tmp_path: Path) -> None:
        gpt2 = GPT2.make_checkpoint(tmp_path / "gpt2")

        def rename(tensors: dict[str, Tensor]) -> None:
            for name in list(tensors):
                tensors[name.removeprefix("transformer.")] = tensors.pop(name)
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 96, 96)
            tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

        old = copy(gpt2, tmp_path / "old", rename)
        assert torch.equal(logits_of(GPT2, old), logits_of(GPT2, gpt2.path))

    def test_shards_in_reverse_order(self, llama: Checkpoint, tmp_path: Path) -> None:
        """A leaf's parts may come from different files, in any order."""
        shutil.copy(llama.path / "config.json", tmp_path)
        tensors = sorted(load_file(llama.path / "model.safetensors").items(), reverse=True)
        files = {}
        for index in range(4):
            name = f"model-{index}.safetensors"
            shard = dict(tensors[index::4])
            save_file(shard, tmp_path / name)
            files.update(dict.fromkeys(shard, name))
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
        assert torch.equal(logits_of(LLAMA, tmp_path), logits_of(LLAMA, llama.path))

    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("rows", [False, True])
    def test_all_experts_in_one_tensor(
        self, mixtral: Checkpoint, tmp_path: Path, rows: bool, ranks: int
    ) -> None:
        """Along a dimension of their own, or as runs of rows."""
        stored = copy(mixtral, tmp_path, functools.partial(stack_experts, rows=rows))
        info = MIXTRAL.resolve(stored, max_model_len=64)

        def work(communicator: Communicator) -> Tensor:
            context = build_context(info, communicator=communicator)
            return PagedDriver(load_model(info, context)).step({"a": PROMPT})

        for logits in run_ranks(ranks, work):
            expected = logits_of(MIXTRAL, mixtral.path)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    def test_a_stack_of_too_few_experts(self, mixtral: Checkpoint, tmp_path: Path) -> None:
        def cut(tensors: dict[str, Tensor]) -> None:
            stack_experts(tensors)
            name = "model.layers.1.mlp.experts.down_proj"
            tensors[name] = tensors[name][:-1].contiguous()

        info = MIXTRAL.resolve(copy(mixtral, tmp_path, cut), max_model_len=64)
        with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.experts\.down_proj.* needs 5 of"):
            load_model(info, build_context(info))

    def test_16_bit_checkpoint_in_float32(self, llama: Checkpoint, tmp_path: Path) -> None:
        def halve(tensors: dict[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                tensors[name] = tensor.half()

        def restore(tensors: dict[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                tensors[name] = tensor.half().float()

        half = copy(llama, tmp_path / "half", halve)
        whole = copy(llama, tmp_path / "whole", restore)
        assert torch.equal(logits_of(LLAMA, half), logits_of(LLAMA, whole))


def stack_experts(tensors: dict[str, Tensor], rows: bool = False) -> None:
    """Mixtral's experts as transformers 5 holds them; with ``rows``, one below the other."""
    stacks: dict[str, list[Tensor]] = {}
    for name in sorted(name for name in tensors if name.endswith(".w1.weight")):
        start, up = name.removesuffix("w1.weight"), name.replace("w1", "w3")
        layer = start.split(".block")[0]
        both = torch.cat([tensors.pop(name), tensors.pop(up)])
        stacks.setdefault(f"{layer}.mlp.experts.gate_up_proj", []).append(both)
        down = tensors.pop(f"{start}w2.weight")
        stacks.setdefault(f"{layer}.mlp.experts.down_proj", []).append(down)
    join = torch.cat if rows else torch.stack
    tensors.update({name: join(parts) for name, parts in stacks.items()})


OLD_SPELLINGS: list[tuple[Any, Callable[[dict[str, Any]], None]]] = []


def old_spelling(suite: Any) -> Callable[[Callable[[dict[str, Any]], None]], None]:
    return lambda change: OLD_SPELLINGS.append((suite, change))


@old_spelling(LLAMA)
def _(config: dict[str, Any]) -> None:
    block = config.pop("rope_parameters")
    config["rope_theta"] = block.pop("rope_theta")
    config["rope_scaling"] = block
    config["torch_dtype"] = config.pop("dtype")


@old_spelling(families.TestPhi3())
def _(config: dict[str, Any]) -> None:
    block = config.pop("rope_parameters")
    config["rope_theta"] = block.pop("rope_theta")
    config["partial_rotary_factor"] = block.pop("partial_rotary_factor")
    del block["original_max_position_embeddings"], block["rope_type"]
    config["rope_scaling"] = {**block, "type": "su"}


@old_spelling(families.TestGemma3())
def _(config: dict[str, Any]) -> None:
    block = config.pop("rope_parameters")
    config["rope_theta"] = block["full_attention"].pop("rope_theta")
    config["rope_local_base_freq"] = block["sliding_attention"]["rope_theta"]
    config["rope_scaling"] = block["full_attention"]
    del config["layer_types"]
    config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    del config["tie_word_embeddings"]  # the family's default


@old_spelling(families.TestGemma2())
def _(config: dict[str, Any]) -> None:
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    del config["layer_types"], config["tie_word_embeddings"]


@old_spelling(families.TestQwen3())
def _(config: dict[str, Any]) -> None:
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    del config["layer_types"]


@old_spelling(families.TestQwen3Moe())
def _(config: dict[str, Any]) -> None:
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["num_experts"] = config.pop("num_local_experts")


@pytest.mark.parametrize(("suite", "change"), OLD_SPELLINGS, ids=lambda v: type(v).__name__)
def test_config_as_transformers_4_wrote_it(
    suite: Any, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    new = suite.make_checkpoint(tmp_path / "new")
    old = copy(new, tmp_path / "old", change_config=change)
    assert torch.equal(logits_of(suite, old), logits_of(suite, new.path))


class TestMemory:
    def test_weights_do_not_depend_on_the_file(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = copy(llama, tmp_path)
        model = LLAMA.open(path)
        file = path / "model.safetensors"
        with open(file, "r+b") as handle:
            handle.seek(4096)
            handle.write(b"\xff" * (file.stat().st_size - 4096))
        expected = logits_of(LLAMA, llama.path)
        assert torch.equal(PagedDriver(model).step({"a": PROMPT}), expected)

    def test_each_leaf_lets_go_of_its_tensors(
        self, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At most one block's tensors wait at any time, though two copies would fit."""
        alive: list[weakref.ref[Tensor]] = []
        most = 0
        original = SafetensorsFormat.tensors

        def counted(self: SafetensorsFormat, *args: Any) -> Iterator[tuple[str, Tensor, Path]]:
            nonlocal most
            for name, tensor, file in original(self, *args):
                own = tensor.clone()
                alive.append(weakref.ref(own))
                most = max(most, sum(ref() is not None for ref in alive))
                yield name, own, file
                del own

        monkeypatch.setattr(SafetensorsFormat, "tensors", counted)
        LLAMA.open(llama.path)
        assert len(alive) > 30
        assert most <= 12

    def test_progress_counts_bytes(self, llama: Checkpoint) -> None:
        seen: list[LoadProgress] = []
        info = LLAMA.resolve(llama.path, max_model_len=64)
        load_model(info, build_context(info), progress=seen.append)
        assert seen[-1].done == seen[-1].total == info.weight_bytes
        assert [p.done for p in seen] == sorted(p.done for p in seen)
        assert {(p.phase, p.unit, p.detail) for p in seen} == {
            ("weights", "B", "model.safetensors")
        }

    def test_dummy_weights_follow_the_seed(self, llama: Checkpoint) -> None:
        info = LLAMA.resolve(llama.path, max_model_len=64)

        def logits(seed: int) -> Tensor:
            model = load_model(
                info, build_context(info), load=LoadConfig(load_format="DUMMY"), seed=seed
            )
            return PagedDriver(model).step({"a": PROMPT})

        assert torch.equal(logits(1), logits(1))
        assert not torch.equal(logits(1), logits(2))


class ScaledQuant(PlainQuant):
    """Integers and a scale per output, to see a method with two tensors loaded and sharded."""

    name: ClassVar[str] = "scaled"
    is_plain: ClassVar[bool] = False

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        if not spec.name.startswith("model.layers"):
            return super().create(spec)
        return {
            "weight": TensorSpec((spec.out_features, spec.in_features), "int8", in_dim=1),
            "weight_scale": TensorSpec((spec.out_features, 1), None),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Any:
        if "weight_scale" not in tensors:
            return super().finish(spec, tensors)
        return self.ops.linear.pack(tensors["weight"] * tensors["weight_scale"])


def quantize(tensors: dict[str, Tensor]) -> None:
    """Layers' matrices (not the routers) to int8; everything else stays."""
    for name, weight in list(tensors.items()):
        if ".layers." in name and weight.dim() == 2 and not name.endswith("gate.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[name + "_scale"] = scale


def dequantize(tensors: dict[str, Tensor]) -> None:
    quantize(tensors)
    for name in list(tensors):
        if name.endswith("_scale"):
            scale = tensors.pop(name)
            tensors[name.removesuffix("_scale")] = tensors[name.removesuffix("_scale")] * scale


class TestQuantizedLayers:
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("family", ["llama", "mixtral"])
    def test_equal_to_the_dequantized_checkpoint(
        self, family: str, ranks: int, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        suite: Any = {"llama": LLAMA, "mixtral": MIXTRAL}[family]
        checkpoint = request.getfixturevalue(family)
        stored = copy(checkpoint, tmp_path / "stored", quantize)
        expected = logits_of(suite, copy(checkpoint, tmp_path / "plain", dequantize))
        info = suite.resolve(stored, max_model_len=64)

        def work(communicator: Communicator) -> Tensor:
            context = build_context(info, communicator=communicator)
            context = dataclasses.replace(context, quant=ScaledQuant(context.ops))
            return PagedDriver(load_model(info, context)).step({"a": PROMPT})

        for logits in run_ranks(ranks, work):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    def test_scales_of_any_float_stay_wide(self, llama: Checkpoint, tmp_path: Path) -> None:
        seen: list[Tensor] = []

        class WideScales(ScaledQuant):
            def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
                wanted = dict(super().create(spec))
                if "weight_scale" in wanted:
                    shape = (spec.out_features, 1)
                    wanted["weight_scale"] = TensorSpec(shape, "float32", any_float=True)
                return wanted

            def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Any:
                seen.extend(t for name, t in tensors.items() if name == "weight_scale")
                return super().finish(spec, tensors)

        stored = copy(llama, tmp_path / "stored", quantize)
        info = dataclasses.replace(LLAMA.resolve(stored, max_model_len=64), dtype="bfloat16")
        context = build_context(info)
        load_model(info, dataclasses.replace(context, quant=WideScales(context.ops)))
        assert seen
        assert all(scale.dtype == torch.float32 for scale in seen)
        assert any(not torch.equal(scale, scale.bfloat16().float()) for scale in seen)

    def test_optional_tensors_of_some_parts_only(self, llama: Checkpoint, tmp_path: Path) -> None:
        class OptionalScales(ScaledQuant):
            def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
                return {
                    name: dataclasses.replace(one, required=name != "weight_scale")
                    for name, one in super().create(spec).items()
                }

        gone = "model.layers.0.self_attn.q_proj.weight_scale"

        def change(tensors: dict[str, Tensor]) -> None:
            quantize(tensors)
            del tensors[gone]

        stored = copy(llama, tmp_path / "stored", change)
        info = LLAMA.resolve(stored, max_model_len=64)
        context = build_context(info)
        quant = OptionalScales(context.ops)
        with pytest.raises(
            WeightsError, match=r"k_proj\.weight_scale.*3 modules are one layer here"
        ):
            load_model(info, dataclasses.replace(context, quant=quant))

    def test_methods_see_the_checkpoints_names(self, llama: Checkpoint) -> None:
        seen: dict[str, LinearSpec] = {}

        class Listening(PlainQuant):
            def for_layer(self, spec: LinearSpec) -> PlainQuant:
                seen[spec.name] = spec
                return self

        info = LLAMA.resolve(llama.path, max_model_len=64)
        context = build_context(info)
        load_model(info, dataclasses.replace(context, quant=Listening(context.ops)))
        qkv = seen["model.layers.0.self_attn.qkv_proj"]
        start = "model.layers.0.self_attn"
        assert qkv.part_names == (f"{start}.q_proj", f"{start}.k_proj", f"{start}.v_proj")
        assert qkv.out_parts == (88, 44, 44)
        assert qkv.bias
        assert seen["lm_head"].part_names == ()
        held = set(load_file(llama.path / "model.safetensors"))
        for spec in seen.values():
            for name in spec.part_names or (spec.name,):
                assert f"{name}.weight" in held


class TestRefusals:
    def test_indivisible_heads(self, llama: Checkpoint) -> None:
        info = LLAMA.resolve(llama.path, max_model_len=64)

        def work(communicator: Communicator) -> None:
            load_model(info, build_context(info, communicator=communicator))

        with pytest.raises(
            UnsupportedModel, match=r"cannot be divided over tensor_parallel_size = 3"
        ):
            run_ranks(3, work)

    def test_gpt2_has_no_more_positions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpt2 = GPT2.make_checkpoint(tmp_path)
        monkeypatch.setenv("HEADRACE_ALLOW_LONG_MAX_MODEL_LEN", "1")
        with pytest.raises(UnsupportedModel, match=r"max_model_len = 97.*n_positions = 96"):
            GPT2.open(gpt2.path, max_model_len=97)

    def test_missing_key_is_named(self, llama: Checkpoint, tmp_path: Path) -> None:
        path = copy(llama, tmp_path, change_config=lambda c: c.pop("intermediate_size"))
        with pytest.raises(UnsupportedModel, match="'intermediate_size'"):
            LLAMA.open(path)

    def test_every_entry_point_can_be_imported(self) -> None:
        for name in plugins.installed("headrace.models"):
            assert plugins.load("headrace.models", name).weight_rules

    def test_foreign_family_is_named_as_such(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace_models import implementation

        foreign = plugins.Plugin("headrace.models", "X", "x:X", "acme-models 1.2")
        monkeypatch.setattr(plugins, "installed", lambda _: {"X": foreign})
        assert implementation.source_of("X") == "plugin:acme-models 1.2"


def test_resolved_info_is_plain_data(llama: Checkpoint) -> None:
    info: ModelInfo = LLAMA.resolve(llama.path)
    json.dumps(dataclasses.asdict(info) | {"path": str(info.path)})
