"""A GGUF file of blocks through whole engines and a server: in the memory that it takes as a file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import gguf_blocks
import numpy as np
import pytest
import torch
from forks import run_command
from gguf import GGMLQuantizationType as Type
from gguf_blocks import write_demo
from safetensors.torch import load_file, save_file
from servers import PATIENCE, serving
from test_gguf_packed import is_native

from headrace import LLM, SamplingParams, demo
from headrace_core.errors import ConfigError

SMALL: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "num_threads": 1,
    "dtype": "float32",
}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
TYPES = {"attn_v": "Q6_K", "token_embd": "Q6_K", "ffn_down": "Q8_0"}
"""As Q4_K_M: the rest is Q4_K. Rows of the demo model's down projections are not of whole blocks of 256."""
NATIVE = all(map(is_native, ("Q4_K", "Q6_K", "Q8_0")))
KERNELS = {} if NATIVE else {"quant_linear": "reference"}


def kind_of(name: str) -> Type:
    stem = name.removesuffix(".weight").rpartition(".")[2]
    return Type[TYPES.get(stem, "Q4_K")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo-Q4_K_M.gguf"
    return write_demo(path, kind_of, encode=gguf_blocks.rounded)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], str]:
    """The answer of a checkpoint of the floats that the blocks stand for."""
    folder = shutil.copytree(demo.path(), tmp_path_factory.mktemp("floats") / "m")
    writing, alone = (
        gguf_blocks.gguf_writing(),
        {"num_attention_heads": 1, "num_key_value_heads": 1},
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            kind = kind_of(writing._renamed(name, tensor, alone, "")[0])
            blocks = gguf_blocks.rounded(tensor.float().numpy(), kind)
            floats = np.ascontiguousarray(gguf_blocks.gguf.quants.dequantize(blocks, kind))
            tensors[name] = torch.from_numpy(floats)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return answer(model=str(folder))


def answer(**settings: Any) -> tuple[list[int], str]:
    with LLM(**{**SMALL, **settings}) as llm:
        output = llm.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0]
    return list(output.token_ids), output.text


@pytest.mark.parametrize("quantization", [None, "gguf", "none"])
def test_the_answer_is_that_of_the_floats(
    quantization: str | None, file: Path, expected: tuple[list[int], str]
) -> None:
    assert answer(model=str(file), quantization=quantization, kernels=KERNELS) == expected


def test_blocks_may_be_rounded_anew(file: Path) -> None:
    found, text = answer(model=str(file), quantization="int8")
    assert found
    assert text


def test_a_method_of_other_files_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"'awq': the checkpoint is quantized with 'gguf'"):
        answer(model=str(file), quantization="awq")


def test_parts_of_a_split_file(tmp_path: Path, expected: tuple[list[int], str]) -> None:
    first = write_demo(tmp_path / "demo.gguf", kind_of, encode=gguf_blocks.rounded, splits=11)
    assert first.name.startswith("demo-00001-of-")
    assert answer(model=str(first), kernels=KERNELS) == expected


def test_the_original_config_beside_it(file: Path, expected: tuple[list[int], str]) -> None:
    found = answer(model=str(file), hf_config_path=str(demo.path()), kernels=KERNELS)
    assert found == expected


def test_dummy_weights(file: Path) -> None:
    found, _ = answer(model=str(file), load_format="dummy", kernels=KERNELS)
    assert found


def test_inspect_tells_types_and_memory(file: Path) -> None:
    done, plain = (
        run_command("inspect", str(file), *words, timeout=PATIENCE).stdout
        for words in (["--json"], [])
    )
    found = json.loads(done)
    assert found["quantization"] == "gguf"
    assert found["block_types"] == {"Q4_K": 25, "Q6_K": 6, "Q8_0": 5}
    tables = 1 << 20  # of rotary angles
    assert found["memory"]["weights"] < 1.15 * file.stat().st_size + tables
    assert "quantization     gguf (Q" in plain


def test_a_server_answers(file: Path, expected: tuple[list[int], str]) -> None:
    words = ["--dtype", "float32", "--max-model-len", "512", "--kernels", json.dumps(KERNELS)]
    with serving(str(file), *words, "--served-model-name", "m") as server:
        body = {"model": "m", "messages": CHAT, "temperature": 0, "max_tokens": 16}
        request = urllib.request.Request(
            f"{server.api}/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            found = json.load(response)
    assert found["choices"][0]["message"]["content"] == expected[1]


LOAD = """
import dataclasses, sys
from pathlib import Path
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.quantization import quant_method
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import build_context

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

info = resolve(ModelConfig(model=sys.argv[1], dtype="float32"), LoadConfig(), CpuPlatform())
ops = bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "cpu"})
context = build_context(info, ops=ops)
method = quant_method(info, None, ops, device="cpu")
context = dataclasses.replace(context, quant=method)
before = status("VmRSS")
model = load_model(info, context)
print(status("VmHWM") - before, sum(t.numel() * t.itemsize for t in model.parameters()))
"""


@pytest.mark.keep(1, every_value=False)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q8_0"), ("Q4_K", "Q6_K"), ("Q5_K", "IQ4_XS"), ("Q2_K", "Q3_K")]
)
def test_memory_is_that_of_the_file(kinds: tuple[str, str], tmp_path: Path) -> None:
    """Packed weights, and at the peak besides one layer that is taken apart: never the file's floats."""
    # Values of 4 and 8 bits with plain scales are packed by every version of the kernel.
    if kinds != ("Q4_0", "Q8_0") and not all(map(is_native, kinds)):
        pytest.skip(f"the CPU kernel does not take {kinds}")
    file = large_file(tmp_path / "large.gguf", *(Type[kind] for kind in kinds))
    size = file.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(file)],
        capture_output=True, text=True, timeout=PATIENCE * 4, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak, held = map(int, done.stdout.split())
    assert held < 1.15 * size, (held, size)
    assert peak < 1.15 * size + SPARE, (peak, size)


HIDDEN, INNER, VOCAB = 1024, 2816, 4096
SPARE = 64 << 20
"""Bytes of one layer that is taken apart, of slices of it, of code that is imported, and of the file's pages;
the weights' floats would be 240 million bytes."""


def large_file(path: Path, first: Type, second: Type) -> Path:
    """A llama of random blocks, 56 million weights; down projections and values are of the second type."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 128, "embedding_length": HIDDEN, "block_count": 4,
        "feed_forward_length": INNER, "attention.head_count": 8,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    for layer in range(4):
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name, (rows, inputs) in shapes.items():
        kind = second if name.endswith(("attn_v", "ffn_down")) else first
        count = inputs // gguf.GGML_QUANT_SIZES[kind][0]
        blocks = gguf_blocks.random_blocks(kind, rows * count, seed=len(name))
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
