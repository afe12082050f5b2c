"""What ``headrace plan`` reckons, against models that are loaded and an engine that runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, STATE_FAMILIES, save_model
from quantized_checkpoints import save_gptq

from headrace import LLM, SamplingParams
from headrace.assembly.footprint import specs_of
from headrace.cli.main import run
from headrace.engine_args import EngineArgs
from headrace.planning.devices import Devices
from headrace.planning.layouts import Layout
from headrace.planning.model_shape import DecoderSizes, ModelShape, shape_of
from headrace.planning.plan import Planner
from headrace_core.config import LoadConfig
from headrace_core.executor import MemoryProfile
from headrace_distributed.shm.communicator import SharedMemory
from headrace_engine.execution.division import CacheLimits
from headrace_engine.execution.memory import plan_cache
from headrace_engine.kv.grouping import plan_groups
from headrace_models.layers.base import walk
from headrace_models.layers.held_weights import tensors_in
from headrace_models.loading.absent_group import AbsentGroup
from headrace_models.loading.loader import Built, load_model
from headrace_models.stages.stage import Stage as Cut
from headrace_models.weight_bytes import kept_bytes

WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "head_dim": 64,
    "shared_expert_intermediate_size": 128, "num_hidden_layers": 2, "kv_lora_rank": 128, "q_lora_rank": 128,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "mamba_d_head": 64, "mamba_d_state": 64,
    "layer_types": ["linear_attention", "full_attention"], "attn_layer_indices": [1],
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "vocab_size": 512,
}  # fmt: skip
"""Sizes of which kernels pad little."""
KINDS = ("llama", "llama3", "qwen3_moe", "deepseek_v3", "bamba")
DEVICES = Devices(2, 1 << 30, 1e11, link=1e10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


def wide(kind: str, folder: Path) -> Path:
    """A checkpoint of a family in sizes as kernels like them."""
    path = folder / kind
    if not path.exists():
        config_class, sizes = (FAMILIES | STATE_FAMILIES)[kind]
        wider = {name: WIDE.get(name, value) for name, value in sizes.items()}
        path.mkdir()
        save_model(kind, path, {kind: (config_class, wider)})
    return path


def planner(path: Path, concurrency: int = 4, **settings: Any) -> Planner:
    args = EngineArgs(
        model=str(path), skip_tokenizer_init=True, block_size=16,
        **{"max_model_len": 128, **settings},
    )  # fmt: skip
    return Planner(args.create_engine_config(), concurrency)


def held_bytes(model: Any) -> int:
    """Bytes of all tensors that a loaded model holds, each counted once."""
    found: dict[int, int] = {}
    for piece in [model, *(piece for _, piece in walk(model))]:
        for name, value in vars(piece).items():
            for _, tensor in tensors_in(name, value):
                if tensor.device.type != "meta":
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def loaded(planned: Planner, rank: int, ranks: int) -> Any:
    context = dataclasses.replace(planned.models.context, communicator=AbsentGroup(rank, ranks))
    return load_model(planned.resolved.info, context, load=LoadConfig())


def need_native_kernels(planned: Planner) -> None:
    """The reference keeps packed weights otherwise."""
    if "cpu" not in planned.models.context.ops.providers.values():
        pytest.skip("the native CPU kernels are not built")


def check_weights(planned: Planner) -> None:
    need_native_kernels(planned)
    for ranks in (1, 2):
        [stage] = planned.models.stages(Layout(ranks))
        for rank in range(ranks):
            assert held_bytes(loaded(planned, rank, ranks)) == pytest.approx(
                stage.weights, rel=0.01
            )


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_what_was_planned(kind: str, folder: Path) -> None:
    check_weights(planner(wide(kind, folder)))


@pytest.mark.parametrize("quantization", ["int8", "int4_g32"])
def test_rounded_weights(quantization: str, folder: Path) -> None:
    check_weights(planner(wide("llama", folder), quantization=quantization))


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    save_gptq(tmp_path, hidden_size=128, intermediate_size=192)
    planned = planner(tmp_path)
    need_native_kernels(planned)
    for ranks in (1, 2):
        [stage] = planned.models.stages(Layout(ranks))
        # The number of each input's group, which is not kept: more than a per cent at this size.
        inputs = 4 * 4 * (3 * 128 + (64 + 192) // ranks + 2 * 128)
        held = held_bytes(loaded(planned, ranks - 1, ranks))
        assert held <= stage.weights
        assert held == pytest.approx(stage.weights - inputs, rel=0.04)


def test_stages_and_spread_experts_are_the_whole_model(folder: Path) -> None:
    planned = planner(wide("deepseek_v3", folder))
    parts = planned.models.of(1).parts
    stages = planned.models.stages(Layout(pipeline=2))
    assert sum(stage.weights for stage in stages) == parts.weights + parts.tables
    assert [len(stage.specs) for stage in stages] == [1, 1]
    divided, [spread] = (
        planned.models.stages(Layout(2)), planned.models.stages(Layout(2, experts=True))
    )  # fmt: skip
    assert spread.weights == divided[0].weights  # 6 experts: three whole ones, or half of each
    odd = planner(wide("qwen3_moe", folder), hf_overrides={"num_experts": 5}).models
    expert = odd.of(1).parts.layers[0].experts[0].num_bytes // 5
    assert odd.of(2, experts=True).parts.layers[0].experts[0].num_bytes == 3 * expert
    more = odd.stages(Layout(2, experts=True))[0].weights - odd.stages(Layout(2))[0].weights
    assert more == 2 * expert // 2  # in each of 2 layers three experts, not two and a half


def test_engines_that_share_experts_keep_a_part_of_them(folder: Path) -> None:
    """Of six experts, two engines have three each; everything else each of them has whole."""
    models = planner(wide("deepseek_v3", folder)).models
    [alone], [one] = models.stages(Layout()), models.stages(Layout(data=2, experts=True))
    kept = sum(experts.num_bytes for experts in one.experts)
    assert sum(experts.num_bytes for experts in alone.experts) == 2 * kept > 0
    assert alone.weights - one.weights == kept
    assert (one.reads, one.reductions, one.reduced) == (alone.reads, 0, 0)
    assert one.meetings == len(one.experts)
    assert one.step_reads(1, engines=2) == one.reads + round(
        kept * (1 - (1 - one.experts[0].top_k / 6) ** 2)
    )
    layout = Layout(data=2, experts=True)
    plan = planner(wide("deepseek_v3", folder)).plan(layout, DEVICES)
    assert plan.runs
    assert plan.traffic is not None
    hidden = models.of(1).parts.hidden_size * 4
    # Two ranks: a rank sends its own token's row, and a sum for the other's.
    assert plan.traffic.sent == 2 * hidden * one.meetings


@pytest.mark.parametrize("kind", ["llama3", "deepseek_v3", "bamba"])
def test_stages_are_those_of_the_engine(kind: str, folder: Path) -> None:
    planned = planner(wide(kind, folder))
    for index, stage in enumerate(planned.models.stages(Layout(pipeline=2))):
        context = dataclasses.replace(planned.models.context, stage=Cut(index, 2))
        model = Built.of(planned.resolved.info, context).model
        assert kept_bytes(model, "float32") == pytest.approx(stage.weights, rel=1e-3)
        assert specs_of(model) == stage.specs


def test_the_first_stage_has_what_is_no_layer(folder: Path) -> None:
    """A table that is the head too is there once, and read once a step."""
    models = planner(wide("llama3", folder)).models
    first, last = models.stages(Layout(pipeline=2))
    table, norm = 4 * 512 * 256, 4 * 256
    assert first.weights - last.weights == table + norm
    assert first.reads - last.reads == table + norm


def test_an_engine_holds_and_exchanges_what_was_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent layers, attention, experts and a shared expert, over two ranks."""
    path = wide("qwen3_next", folder)
    planned = planner(path, concurrency=3)
    plan = planned.plan(Layout(2), DEVICES)
    [memory] = plan.memory
    assert plan.traffic is not None
    sums: list[int] = []
    gathered: list[int] = []
    whole, gather = SharedMemory.all_reduce, SharedMemory.all_gather

    def counted(self: SharedMemory, tensor: torch.Tensor) -> torch.Tensor:
        sums.append(tensor.nbytes)
        return whole(self, tensor)

    def counted_logits(self: SharedMemory, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        gathered.append(2 * tensor.nbytes)
        return gather(self, tensor, dim)

    monkeypatch.setattr(SharedMemory, "all_reduce", counted)
    monkeypatch.setattr(SharedMemory, "all_gather", counted_logits)
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True, "block_size": 16, "max_model_len": 128, "max_num_seqs": 3,
        "kv_cache_memory_bytes": memory.cache, "enforce_eager": True, "tensor_parallel_size": 2,
        "communicator": "shm", "use_tqdm_on_load": False, "max_num_batched_tokens": 64,
        "num_threads": 2,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(str(path), **settings) as llm:
        sums.clear()
        gathered.clear()
        llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        reports = llm.collective_rpc("report")
    # A step for the prompt's three tokens, and two for a token each.
    assert sum(sums) == plan.traffic.reduced * (3 + 1 + 1)
    assert len(sums) == 3 * plan.traffic.reductions
    assert gathered == 3 * [plan.traffic.gathered]
    for report in reports:
        assert memory.cache - 16 * plan.cache_per_token < report["cache_bytes"] <= memory.cache


def test_a_bound_is_bytes_over_bandwidths(folder: Path) -> None:
    planned = planner(wide("llama", folder), concurrency=4)
    [stage] = planned.models.stages(Layout(2))
    token = (
        2 * 2 * 1 * 64 * 4
    )  # keys and values in two layers, of one head of 64 numbers on this rank
    reads = stage.reads + 4 * 128 * token
    # 4 tokens: two sums in each layer and one of vectors, by a ring of 2 all of it; and half of the logits.
    sent = 4 * ((2 * 2 + 1) * 256 * 4 + 512 * 4 // 2)
    bound = planned.plan(Layout(2), DEVICES).bound
    assert bound is not None
    assert bound.exchange_seconds == pytest.approx(sent / 1e10)
    assert bound.step_seconds == pytest.approx(reads / 1e11 + sent / 1e10)
    assert bound.tokens_per_second == pytest.approx(4 / bound.step_seconds)
    table, head, places = 4 * 512 * 256, 4 * 512 * 256, (8 + 4) * 512
    whole = planned.models.of(1).parts
    assert stage.reads == stage.weights - whole.tables - table // 2 - places
    assert whole.head.reads == head + 4 * 256


def told(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Status, JSON and last line of standard error."""
    capsys.readouterr()
    status = run("plan", [str(path), "--skip-tokenizer-init", "--json", *words])
    out, err = capsys.readouterr()
    return status, json.loads(out), err.splitlines()[-1] if err else ""


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """A config of 1.6 billion parameters, without weights."""
    path = folder / "large"
    path.mkdir()
    config: Mapping[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_command_names_a_layout_that_fits(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--devices", "2x4GiB@50GB/s", "--link", "20GB/s", "--context", "2k")
    status, found, _ = told(large, capsys, *words)
    assert status == 0
    advice, by_flags = found["advice"], {one["flags"]: one for one in found["layouts"]}
    assert advice["flags"] == "-tp 2"
    assert "-tp 2 --max-model-len=2000 --max-num-seqs=8" in advice["command"]
    assert by_flags["-tp 2"]["runs"]
    assert by_flags["-dp 2"]["missing_bytes"] == by_flags["-dp 2"]["stages"][0]["missing"]
    assert by_flags["-dp 2"]["runs"] is (by_flags["-dp 2"]["missing_bytes"] == 0)
    run("plan", [str(large), "--skip-tokenizer-init", *words])
    text = capsys.readouterr().out
    assert "recommended: -tp 2\n" in text
    assert text.rstrip().endswith(advice["command"].partition("serve")[2])


def test_what_cannot_fit_is_refused_with_what_would(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found, said = told(large, capsys, "--devices", "1GiB@50GB/s", "--context", "2k")
    assert status == 4, said
    [only] = found["layouts"]
    missing = only["missing_bytes"]
    assert missing == only["stages"][0]["needed"] - int(0.9 * (1 << 30))
    assert f"needs {missing / (1 << 30):.2f} GiB more for each device" in said
    assert found["advice"]["flags"] is None
    [remedy] = found["advice"]["remedies"]
    count = int(remedy.split()[0])
    for number, status in ((count, 0), (count // 2, 4)):
        words = ("--devices", f"{number}x1GiB@50GB/s", "--context", "2k")
        assert told(large, capsys, *words)[0] == status
    status, found, said = told(large, capsys, "--devices", "3GiB@50GB/s", "--context", "2k")
    assert status == 4, said
    remedies = found["advice"]["remedies"]
    assert "--quantization int8" in remedies
    words = ("--devices", "3GiB@50GB/s", "--context", "2k")
    assert told(large, capsys, *words, "--quantization", "int8")[0] == 0
    for remedy in remedies:
        if remedy.startswith("--con"):
            flag, number = remedy.split()
            assert told(large, capsys, *words, flag, number)[0] == 0
            assert told(large, capsys, *words, flag, str(int(number) + 64))[0] == 4


def test_what_the_engine_refuses_is_said_in_its_words(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found, _ = told(large, capsys, "--devices", "3x8GiB@50GB/s", "--context", "2k")
    assert status == 0
    by_flags = {one["flags"]: one for one in found["layouts"]}
    reason = "32 heads or columns cannot be divided over tensor_parallel_size = 3"  # test_tensor_parallel
    assert reason in by_flags["-tp 3"]["refused"]
    assert run("inspect", [str(large), "--skip-tokenizer-init", "-tp", "3"]) == 0
    assert by_flags["-tp 3"]["refused"] in capsys.readouterr().out
    assert found["advice"]["flags"] == "-dp 3"


def test_experts_are_not_spread_where_there_are_fewer(folder: Path) -> None:
    config_class, sizes = FAMILIES["qwen3_moe"]
    path = folder / "eight_heads"
    path.mkdir()
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    save_model("qwen3_moe", path, {"qwen3_moe": (config_class, {**sizes, **heads})})
    refused = planner(path).plan(Layout(8, experts=True), DEVICES._replace(number=8))
    assert "6 experts cannot be divided over tensor_parallel_size = 8" in refused.refused


def test_words_that_are_no_devices(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, field in (
        (("--devices", "2x64GiB"), "devices"),
        (("--devices", "2x64GiB@100GB/s", "--link", "fast"), "link"),
        (("--devices", "2x64GiB@100GB/s", "-tp", "3"), "devices"),
        (("--devices", "cpu", "--concurrency", "0"), "concurrency"),
        (("--devices", "2xcpu", "-tp", "2", "-dcp", "2"), "decode_context_parallel_size"),
        (("--devices", "2xcpu", "-pcp", "2"), "prefill_context_parallel_size"),
        (("--devices", "2xcpu", "--link-latency", "5us"), "link_latency"),
        (("--devices", "2xcpu", "--max-num-seqs", "5"), "max_num_seqs"),
        (("--devices", "2xcpu", "--max-model-len", "5", "--context", "5"), "context"),
    ):
        assert run("plan", [str(large), "--skip-tokenizer-init", *words]) == 2
        assert f"{field}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_the_cache_is_the_least_that_holds_the_requests(kind: str, folder: Path) -> None:
    planned = planner(wide(kind, folder), concurrency=5)
    [stage] = planned.models.stages(Layout(2))
    [memory] = planned.plan(Layout(2), DEVICES).memory
    limits = CacheLimits.of(planned.resolved.config, 128)
    profile = MemoryProfile(memory.weights, memory.activations, DEVICES.memory, 0.0)

    def room(num_bytes: int) -> int:
        cache = dataclasses.replace(planned.resolved.config.cache, kv_cache_memory_bytes=num_bytes)
        groups = plan_groups(stage.specs)
        return plan_cache(profile, groups, cache, limits, device="cpu").largest_batch

    assert room(memory.cache) == 5
    assert room(memory.cache - 1) == 4


def test_a_built_models_shape_is_that_of_its_sizes(folder: Path) -> None:
    """The model of scaling, from a checkpoint and from sizes alone; on one rank and divided."""
    planned = planner(wide("llama", folder), dtype="bfloat16")
    config = planned.resolved.info.config
    heads = config["num_attention_heads"]
    sizes = DecoderSizes(
        config["hidden_size"], config["num_hidden_layers"], heads, config["num_key_value_heads"],
        config.get("head_dim") or config["hidden_size"] // heads, config["intermediate_size"],
        config["vocab_size"],
    )  # fmt: skip
    for ranks in (1, 2):
        shape = shape_of(planned.models.of(ranks), config, planned.models.item_bytes, ranks)
        expected = sizes.shape(ranks)

        def products(of: ModelShape) -> dict[Any, int]:
            """Layers of equal sizes may be different ones."""
            found: dict[Any, int] = {}
            for each in of.products:
                key = each._replace(num_bytes=float(each.num_bytes), number=1)
                found[key] = found.get(key, 0) + each.number
            return found

        assert products(shape) == products(expected)
        assert shape.layers == expected.layers
        assert shape.context_bytes == expected.context_bytes
        assert shape.pair_operations == expected.pair_operations
        # Ranks also sum rows of the divided table of input vectors.
        assert 0 <= shape.reductions - expected.reductions <= ranks - 1
