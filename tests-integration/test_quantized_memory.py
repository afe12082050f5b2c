"""Memory of loaded checkpoints of packed weights: that of their files, not of their floats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from servers import PATIENCE
from test_gguf_served import LOAD
from torch import Tensor

HIDDEN, INNER, VOCAB, BLOCKS = 1024, 2816, 2048, 8
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
"""Module -> outputs and inputs: 12.8 million weights a block, 103 million in all."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": BLOCKS, "num_attention_heads": 8,
    "num_key_value_heads": 8,     "vocab_size": VOCAB,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
SPARE = 24 << 20
"""Bytes of imported code, and of the unused ends of large pages; floats would be 206 million bytes, and codes
of a byte each 103 million."""
SCRIPT = (
    LOAD.replace('dtype="float32"', 'dtype="bfloat16"')
    .replace('"VmRSS"', '"RssAnon"')
    .replace(
        "model = load_model(",
        """
import ctypes, threading
largest, ended = [0], threading.Event()
def watch():
    while not ended.wait(0.001):
        largest[0] = max(largest[0], status("RssAnon") - before)
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(""",
    )
    + """
ended.set()
watcher.join()
ctypes.CDLL(None).malloc_trim(0)
print(largest[0], status("RssAnon") - before, sum(t.numel() * t.itemsize for t in model.parameters()))
"""
)
LAYER = 8 << 20
"""Bytes of the layer that is packed, as it is stored."""
Maker = Callable[[int, int], dict[str, Tensor]]


def octets(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape: int) -> Tensor:
    return octets(*shape, 4).view(torch.int32).squeeze(-1)


def sizes(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(*shape) * 1e-3 + 1e-3).to(dtype)


def gptq(rows: int, inputs: int) -> dict[str, Tensor]:
    groups = inputs // 128
    return {
        "qweight": words(inputs // 8, rows), "qzeros": words(groups, rows // 8),
        "scales": sizes(groups, rows), "g_idx": torch.arange(inputs, dtype=torch.int32) // 128,
    }  # fmt: skip


def awq(rows: int, inputs: int) -> dict[str, Tensor]:
    groups = inputs // 128
    return {
        "qweight": words(inputs, rows // 8), "qzeros": words(groups, rows // 8),
        "scales": sizes(groups, rows),
    }  # fmt: skip


def nf4(rows: int, inputs: int) -> dict[str, Tensor]:
    blocks = rows * inputs // 64
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, inputs],
        "nested_blocksize": 256,        "nested_dtype": "float32", "nested_offset": 0.01,
    }  # fmt: skip
    return {
        "weight": octets(rows * inputs // 2, 1), "weight.absmax": octets(blocks),
        "weight.quant_map": torch.linspace(-1, 1, 16), "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.nested_absmax": sizes(-(-blocks // 256), dtype=torch.float32),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
    }  # fmt: skip


def int8(rows: int, inputs: int) -> dict[str, Tensor]:
    return {
        "weight": octets(rows, inputs).view(torch.int8),
        "weight_scale": sizes(rows, 1, dtype=torch.float32),
    }


def fp8(rows: int, inputs: int) -> dict[str, Tensor]:
    codes = (torch.rand(rows, inputs) * 400).to(torch.float8_e4m3fn)
    return {
        "weight": codes,
        "weight_scale_inv": sizes(rows // 128, inputs // 128, dtype=torch.float32),
    }


def nvfp4(rows: int, inputs: int) -> dict[str, Tensor]:
    return {
        "weight": octets(rows, inputs // 2),
        "weight_scale": sizes(rows, inputs // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1e-3),
    }  # fmt: skip


FORMATS: Mapping[str, tuple[Maker, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 128}),
    "bitsandbytes": (
        nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "int8": (int8, {"quant_method": "int8_weight_only"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
}  # fmt: skip


def write(folder: Path, maker: Maker, block: dict[str, Any]) -> int:
    """A checkpoint of random codes; returns the bytes of its tensors."""
    torch.manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": block}))
    table = sizes(VOCAB, HIDDEN)
    found = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    found["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.float16)
    for index in range(BLOCKS):
        prefix = f"model.layers.{index}."
        for name, shape in SHAPES.items():
            found |= {f"{prefix}{name}.{key}": t for key, t in maker(*shape).items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.float16)
    file = folder / "model.safetensors"
    save_file(found, file, metadata={"format": "pt"})
    return file.stat().st_size


@pytest.mark.keep(1, every_value=False)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_that_of_the_file(name: str, tmp_path: Path) -> None:
    """At the peak, and afterwards, once free memory has gone back to the system, as an engine has it at its
    start; pages of the file, which the system takes back when it needs them, do not count."""
    size = write(tmp_path / "m", *FORMATS[name])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "m")],
        capture_output=True, text=True, timeout=PATIENCE * 4, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak, resident, held = map(int, done.stdout.split()[-3:])
    assert held < 1.15 * size, (held, size)
    assert resident < 1.15 * size + SPARE, (resident, size)
    assert peak < 1.15 * size + SPARE + LAYER, (peak, size)
