"""Blocks of every GGUF type, for tests: the format's own package quantizes to some types and dequantizes all,
so blocks of the others are random bytes with scales that make weights as large as those they stand for."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from headrace import demo

_QUANTIZED = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
)
"""Types that gguf's package quantizes to."""
_HALVES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q2_K": ((80, 1.0), (82, 1.5)), "Q3_K": ((108, 1.0),), "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)), "Q6_K": ((208, 1.0),),
}  # fmt: skip
"""Places of a block's float16 scales, and their sizes, which make the weights' mean zero; others: 0."""

_ENCODED: dict[tuple[Type, tuple[int, ...], bytes], np.ndarray] = {}
"""Blocks by what they were made of: a checkpoint needs them as bytes and as floats, and tests write it again
and again."""


def encode(array: np.ndarray, kind: Type) -> np.ndarray:
    """Rows [..., K] float32 as blocks, uint8 [..., bytes of a row]; a row's depend on the row alone."""
    if kind.name in _QUANTIZED:
        return gguf.quants.quantize(array, kind)
    key = kind, array.shape, hashlib.sha256(array.tobytes()).digest()
    if key not in _ENCODED:
        _ENCODED[key] = _encode(array, kind)
        _ENCODED[key].setflags(write=False)
    return _ENCODED[key]


def _encode(array: np.ndarray, kind: Type) -> np.ndarray:
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = array.reshape(-1, array.shape[-1])
    blocks = [_blocks(row, kind, row.size // elements).reshape(-1) for row in rows]
    return np.stack(blocks).reshape(*array.shape[:-1], array.shape[-1] // elements * num_bytes)


def decoded(array: np.ndarray, kind: Type) -> np.ndarray:
    """The weights [..., K] float32 that :func:`encode`'s blocks are, as gguf's package says."""
    return gguf.quants.dequantize(encode(array, kind), kind)


def rounded(array: np.ndarray, kind: Type) -> np.ndarray:
    """Rows [..., K] float32 in the nearest blocks of Q4_K or Q6_K, by a simple search; of other types as
    :func:`encode`."""
    if kind.name not in ("Q4_K", "Q6_K"):
        return encode(array, kind)
    blocks = array.reshape(-1, 256)
    packed = _q4_k(blocks) if kind.name == "Q4_K" else _q6_k(blocks)
    return packed.reshape(*array.shape[:-1], -1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    least = -groups.min(2).clip(max=0)
    steps = (groups.max(2).clip(min=0) + least) / 15
    d, m = (np.maximum(each.max(1, keepdims=True), 1e-8) / 63 for each in (steps, least))
    d, m = d.astype(np.float16), m.astype(np.float16)
    scales, minimums = (
        np.round(each / by.astype(np.float32)).clip(0, 63).astype(np.uint8)
        for each, by in ((steps, d), (least, m))
    )
    step = np.maximum(d.astype(np.float32) * scales, 1e-12)[:, :, None]
    real = (groups + (m.astype(np.float32) * minimums)[:, :, None]) / step
    values = np.round(real).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    high = (scales[:, 4:] >> 4 << 6, minimums[:, 4:] >> 4 << 6)
    fields = [
        scales[:, :4] | high[0], minimums[:, :4] | high[1],
        scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4,
    ]  # fmt: skip
    nibbles = (values[:, :, 0] | values[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), *fields, nibbles], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    steps = abs(groups).max(2) / 31
    d = (np.maximum(steps.max(1, keepdims=True), 1e-8) / 127).astype(np.float16)
    scales = np.round(steps / d.astype(np.float32)).clip(1, 127).astype(np.int8)
    step = (d.astype(np.float32) * scales)[:, :, None]
    values = (np.round(groups / step).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (values[:, :, :2] & 15 | (values[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = sum(values[:, :, at] >> 4 << 2 * at for at in range(4)).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d.view(np.uint8)], axis=1)


def random_blocks(kind: Type, count: int, seed: int, size: float = 0.01) -> np.ndarray:
    """[count, bytes of a block], of numbers about ``size`` times the codes."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    scales = size * generator.uniform(0.5, 1.5, count)
    _put_scales(blocks, kind, scales)
    return blocks


def _blocks(row: np.ndarray, kind: Type, count: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little")
    return random_blocks(kind, count, seed, size=float(row.std()) / _spread(kind.name))


@functools.cache
def _spread(name: str) -> float:
    """Standard deviation of random blocks' numbers with scales about 1."""
    blocks = random_blocks(Type[name], 500, seed=0, size=1.0)
    return float(gguf.quants.dequantize(blocks, Type[name]).std())


def _put_scales(blocks: np.ndarray, kind: Type, scales: np.ndarray) -> None:
    if kind.name == "IQ1_M":  # in the highest 4 bits of four words
        bits = scales.astype(np.float16).view(np.uint16)
        for word in range(4):
            high = (bits >> 4 * word & 15).astype(np.uint8) << 4
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | high
        return
    if kind.name == "NVFP4":  # 8-bit floats: 4 bits of exponent
        exponents = np.clip(np.round(np.log2(scales)) + 7, 0, 14).astype(np.uint8)
        blocks[:, :4] = exponents[:, None] << 3 | blocks[:, :4] & 7
        return
    if kind.name == "MXFP4":
        blocks[:, 0] = np.round(np.log2(scales)) + 128
        return
    for place, factor in _HALVES.get(kind.name, _plain_halves(kind)):
        halves = (scales * factor).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)


def _plain_halves(kind: Type) -> tuple[tuple[int, float], ...]:
    return {
        "Q4_1": ((0, 1.0), (2, -7.5)), "Q5_1": ((0, 1.0), (2, -15.5)), "TQ1_0": ((52, 1.0),),
        "TQ2_0": ((64, 1.0),),
    }.get(kind.name, ((0, 1.0),))  # fmt: skip


def gguf_writing() -> ModuleType:
    """The writer of the tests of headrace-models."""
    path = Path(__file__).parent.parent / "packages/models/tests/gguf_writing.py"
    spec = importlib.util.spec_from_file_location("gguf_writing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_demo(
    file: Path, kind_of: Callable[[str], Type] = lambda name: Type.F32, **options: Any
) -> Path:
    """The demo model as llama.cpp's converter would write it, tokenizer and template included.

    Args:
        kind_of: GGUF's name of a matrix -> type of its blocks.
        options: of the writer.
    """
    source = demo.path()
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"])
    special = {}
    for token in tokenizer["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        special[token["content"]] = token["special"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    merges = [pair if isinstance(pair, str) else " ".join(pair)
              for pair in tokenizer["model"]["merges"]]  # fmt: skip
    generation = json.loads((source / "generation_config.json").read_text())
    end = generation["eos_token_id"]
    extra = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [
            1 if token not in special else 3 if special[token] else 4 for token in tokens
        ],
        "tokenizer.ggml.eos_token_id": end[0] if isinstance(end, list) else end,
        "tokenizer.chat_template": (source / "chat_template.jinja").read_text(),
    }
    path: Path = gguf_writing().write(
        source, file, "llama", lambda name, _: kind_of(name), extra=extra, **options
    )
    return path
