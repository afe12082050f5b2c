"""Checkpoints of which one file is wrong in one way, and what loading each of them comes to.

A child process loads them one by one with ``LLM``: whatever it dies of is seen, and its memory is counted.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

SEED = 8


class Mutant(NamedTuple):
    """One wrong file of a checkpoint that is right otherwise."""

    file: str
    name: str
    content: bytes
    harmless: bool = False
    """The mutant may load, as the fault may lie where nobody looks."""


def safetensors_mutants(path: Path) -> Iterator[Mutant]:
    """Files that lack tensors, or hold other tensors than they should."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    body = data[8 + length :]

    def made(name: str, content: bytes, harmless: bool = False) -> Mutant:
        return Mutant(path.name, name, content, harmless)

    def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Mutant:
        copy = json.loads(json.dumps(header))
        change(copy)
        text = json.dumps(copy).encode()
        return made(name, struct.pack("<Q", len(text)) + text + body)

    sizes = (0, 1, 7, 8, 9, 8 + length // 2, 8 + length, 9 + length, len(data) // 2, len(data) - 1)
    for size in sizes:
        yield made(f"cut to {size}", data[:size])
    yield made("longer than it says", data + b"\0" * 64)
    for wrong in (0, 1, length - 1, length + 1, len(data), 2**31, 2**53, 2**63, 2**64 - 1):
        yield made(f"header of {wrong}", struct.pack("<Q", wrong) + data[8:])
    for text in (b"{", b"[]", b"null", b"{}", b"\xff" * 10, b"[" * 100_000, b'{"a":' * 50_000):
        yield made(f"header {text[:8]!r}", struct.pack("<Q", len(text)) + text + body)
    names = [name for name in header if name != "__metadata__"]
    rng = random.Random(SEED)
    for name in rng.sample(names, min(8, len(names))):
        yield from _entry_mutants(name, header, changed)
    for number in range(60):
        place = 8 + rng.randrange(length)
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        yield made(f"bit {number} at {place}", bytes(flipped), harmless=True)
    for number in range(10):
        place = rng.randrange(len(data) - 4096)
        noise = data[:place] + rng.randbytes(4096) + data[place + 4096 :]
        yield made(f"noise {number} at {place}", noise, harmless=True)


def _entry_mutants(name: str, header: dict[str, Any], changed: Any) -> Iterator[Mutant]:
    """One tensor's entry, wrong in every way."""
    begin, end = header[name]["data_offsets"]

    def put(key: str, value: Any) -> Mutant:
        return changed(f"{name}.{key} = {value!r:.40}", lambda h: h[name].__setitem__(key, value))

    for offsets in (
        [begin + 1, end], [begin, end + 1], [end, begin], [-1, end], [begin, 2**40], [2**63, 2**64],
        [0.5, end], [begin], "x", None,
    ):  # fmt: skip
        yield put("data_offsets", offsets)
    for shape in ([], [0], [-1], [2**62, 4], [2**32, 2**32], [1.5], ["x"], None, [3, 5, 7]):
        yield put("shape", shape)
    for dtype in ("X", "", None, 3, "F64", "U8"):
        yield put("dtype", dtype)
    yield changed(f"no {name}", lambda h: h.pop(name))
    yield changed(f"{name} renamed", lambda h: h.__setitem__(f"{name}.x", h.pop(name)))
    yield changed(f"{name} is a list", lambda h: h.__setitem__(name, []))


_VALUES: tuple[Any, ...] = (None, -1, 0, 2**40, 1.5, "x", [], {}, True, 1e308, 10**400)
_CONFIG_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps",
                "architectures", "hidden_act", "head_dim")  # fmt: skip


def other_mutants(folder: Path) -> Iterator[Mutant]:
    """Configs, tokenizers and indexes that are broken or say what cannot be."""
    for file in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        if not (folder / file).exists():
            continue
        data = (folder / file).read_bytes()
        for text in (data[: len(data) // 2], b"{", b"[]", b"3", b"\xff\xfe\x00", b"\x00" * 100,
                     b"[" * 100_000, b'{"a":' * 50_000):  # fmt: skip
            yield Mutant(file, f"{text[:10]!r}", text, harmless=file != "config.json")
        yield Mutant(file, "empty", b"", harmless=file == "generation_config.json")
    config = json.loads((folder / "config.json").read_text())
    for key in _CONFIG_KEYS:
        for value in _VALUES:
            text = json.dumps({**config, key: value}).encode()
            yield Mutant("config.json", f"{key} = {value!r:.20}", text, harmless=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for key in tokenizer:
        for value in (3, "x", []):
            text = json.dumps({**tokenizer, key: value}).encode()
            yield Mutant("tokenizer.json", f"{key} = {value!r}", text, harmless=True)
    for weight_map in ({}, {"a": "../x"}, {"a": "nowhere.safetensors"}, 3, {"a": 3}):
        text = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        yield Mutant("model.safetensors.index.json", f"{weight_map!r}", text)


class Outcome(NamedTuple):
    """Result of loading a mutant."""

    kind: str
    """``loaded``, ``refused`` (an error of headrace's), or ``raised``."""
    text: str
    seconds: float
    peak: int
    """Largest memory of the child, in bytes."""


class Loader:
    """A child process that loads checkpoints; begun again if it dies."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def load(self, folder: Path) -> Outcome:
        """Load a checkpoint, or see how it fails. Kind ``died`` if the process did."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{folder}\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            self._child = None
            return Outcome("died", f"exit status {child.wait()}", 0.0, 0)
        return Outcome(*json.loads(line))

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child.wait(60)


def put(mutant: Mutant, original: Path, folder: Path) -> None:
    """Make the folder a copy of the checkpoint (by links) with the mutant's file.

    An index stands in the place of the one file with weights, which would be read in spite of it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    left_out = {mutant.file, "model.safetensors" if "index" in mutant.file else ""}
    for file in original.iterdir():
        if file.name not in left_out:
            (folder / file.name).symlink_to(file)
    (folder / mutant.file).write_bytes(mutant.content)


def _serve() -> None:
    """The child's side: a folder a line, an outcome a line."""
    from headrace import LLM
    from headrace_core.errors import HeadraceError

    out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        begin = time.monotonic()
        try:
            LLM(line.strip(), kv_cache_memory_bytes=32 << 20, enforce_eager=True).close()
            kind, text = "loaded", ""
        except HeadraceError as error:
            kind, text = "refused", str(error)
        except BaseException as error:
            kind, text = "raised", f"{type(error).__name__}: {error}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps([kind, text, time.monotonic() - begin, peak]), file=out, flush=True)


if __name__ == "__main__":
    _serve()
