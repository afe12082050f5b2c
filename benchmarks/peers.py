"""Who is compared: where each engine lives, which files it reads, how it is started at its best.

An engine's *home* is a virtual environment, or for llama.cpp the folder of its programs. It is given as
``--peer NAME=FOLDER`` or in ``HEADRACE_BENCH_<NAME>``. Checkpoints lie below one folder under the names of
:data:`CHECKPOINTS`; what is not there is left out, and said.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import Launch

DRIVEN = Path(__file__).parent / "driven"
CACHE_GIB = 4
"""Key-value cache of every engine that has one."""
MAX_MODEL_LEN = 4096

BLOCKS: Mapping[str, float] = {
    "q4_0": 4.5, "q4_k_m": 4.85, "q5_k_m": 5.7, "q6_k": 6.56, "q8_0": 8.5,
}  # fmt: skip
"""Precision of a GGUF file -> its bits a weight. llama.cpp and headrace read the same file."""
_FILES = {precision: f"gguf/{{model}}-{precision}.gguf" for precision in BLOCKS}

PACKED: Mapping[str, float] = {"awq": 4.25, "gptq": 4.25}
"""Precision of a packed checkpoint -> its bits a weight of the blocks; its head has 16."""
_FOLDERS = {precision: f"{{model}}-{precision}" for precision in PACKED}

CHECKPOINTS: Mapping[str, Mapping[str, str]] = {
    "headrace": {"bf16": "{model}", "int8": "{model}", "int4": "{model}", **_FILES, **_FOLDERS},
    "vllm": {"bf16": "{model}", "int8": "{model}-w8a8", "int4": "{model}-w4a16", **_FOLDERS},
    "openvino": {"bf16": "{model}-ov-fp16", "int8": "{model}-ov-int8", "int4": "{model}-ov-int4"},
    "llamacpp": {
        "bf16": "gguf/{model}-bf16.gguf",
        "int8": "gguf/{model}-q8_0.gguf",
        "int4": "gguf/{model}-q4_0.gguf",
        **_FILES,
    },
    "transformers": {"bf16": "{model}"},
    "headrace-before": {"bf16": "{model}", "int8": "{model}", "int4": "{model}"},
}
"""Engine -> precision -> path below the models' folder. OpenVINO computes fp16 weights in bf16 by itself.
``headrace-before`` is another environment's headrace: a change is measured against what was before it."""
OURS = ("headrace", "headrace-before")

ENGINES = (*CHECKPOINTS, "llama-bench")
HOMES = (*CHECKPOINTS, "sentence-transformers")
"""Engines that may have a home; the last one is compared in embeddings only."""


class Absent(Exception):
    """The engine, or its checkpoint, is not installed; the message says where it was looked for."""


@dataclass(frozen=True)
class Peers:
    """Homes of the engines, and the models' folder."""

    homes: Mapping[str, Path]
    models: Path
    num_threads: int

    def checkpoint(self, engine: str, model: str, precision: str) -> Path:
        """The engine's files of a model.

        Raises:
            Absent: it has none of that precision.
        """
        names = CHECKPOINTS["llamacpp" if engine == "llama-bench" else engine]
        if precision not in names:
            raise Absent(f"{engine} has no {precision} here")
        path = self.models / names[precision].format(model=model)
        if not path.exists():
            raise Absent(f"{path} is not there")
        return path

    def worker(
        self, engine: str, model: str, precision: str, *, cache_gib: int = CACHE_GIB
    ) -> Launch:
        """The engine behind ``worker.py``.

        Raises:
            Absent: it, or its checkpoint, is not installed.
        """
        path = self.checkpoint(engine, model, precision)
        return self.worker_of(engine, path, precision, cache_gib=cache_gib)

    def worker_of(
        self, engine: str, path: Path, precision: str, *, cache_gib: int = CACHE_GIB
    ) -> Launch:
        """As :meth:`worker`, of any checkpoint."""
        settings: dict[str, Any] = {"model": str(path)}
        if engine in (*OURS, "vllm"):
            settings |= {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64}
        if engine in (*OURS, "vllm", "transformers"):
            settings["dtype"] = "bfloat16"
        if engine in OURS:
            settings |= {"skip_tokenizer_init": True, "use_tqdm_on_load": False,
                         "kv_cache_memory_bytes": cache_gib << 30,
                         "kv_cache_ahead_bytes": -1} | _quantized(precision)  # fmt: skip
        if engine == "openvino":
            settings["cache_gib"] = cache_gib
        if engine == "llamacpp":
            tokens = self._cache_tokens(path.stem.rpartition("-")[0], cache_gib)
            settings |= {"num_cache_tokens": tokens, "num_threads": self.num_threads}
        spoken = "headrace" if engine in OURS else engine
        words = [self.python(engine), str(DRIVEN / "worker.py"), spoken, json.dumps(settings)]
        return Launch(words, self.environment(engine, cache_gib), unset(engine))

    def client_worker(self, url: str, version: str) -> Launch:
        """``worker.py`` in front of a server that runs already."""
        settings = json.dumps({"url": url, "version": version})
        return Launch([sys.executable, str(DRIVEN / "worker.py"), "server", settings], {})

    def server(
        self, engine: str, model: str, precision: str, port: int, *, lasting: bool = True
    ) -> Launch:
        """The engine's server on 127.0.0.1; ``lasting``: it may take its time to start.

        Raises:
            Absent: as :meth:`worker`; or it has no server.
        """
        if engine not in SERVERS:
            raise Absent(f"{engine} has no server")
        path = str(self.checkpoint(engine, model, precision))
        words = SERVERS[engine](self, path, str(port))
        if engine == "headrace-before":
            words[0] = self.python(engine)
        if engine in OURS:
            words += [w for k, v in _quantized(precision).items() for w in (f"--{k}", v)]
            if lasting:  # as the others do, who write zeros into their caches
                words += ["--kv-cache-ahead-bytes", "-1"]
        if engine == "llamacpp":
            words += ["-c", str(self._cache_tokens(model))]
        return Launch(words, self.environment(engine), unset(engine))

    def _cache_tokens(self, model: str, cache_gib: int = CACHE_GIB) -> int:
        """Tokens that so much cache holds, in whole thousands; 65,536 at most."""
        config = json.loads((self.models / model / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        num_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim
        return int(min(65536, (cache_gib << 30) // num_bytes // 1024 * 1024))

    def llama_bench(self, model: str, precision: str, prompt: int, output: int) -> list[str]:
        """llama.cpp's own benchmark, one repetition, as JSON.

        A prompt is not run twice: its warm-up is as long as what is measured, and reads a file that is in
        the page cache at the cost of a hundredth of that.
        """
        path = str(self.checkpoint("llama-bench", model, precision))
        warmup = ["--no-warmup"] if prompt else []
        return [self.program("llamacpp", "llama-bench"), "-m", path, "-t", str(self.num_threads),
                "-fa", "1", "-p", str(prompt), "-n", str(output), "-r", "1", "-o", "json",
                *warmup]  # fmt: skip

    def version(self, engine: str) -> str:
        """Version line of a program without a worker; empty where only its benchmark is installed."""
        if engine not in ("llamacpp", "llama-bench"):
            return ""
        try:
            server = self.program("llamacpp", "llama-server")
        except Absent:
            return ""
        said = subprocess.run([server, "--version"], capture_output=True, text=True)
        return next(
            (line for line in (said.stderr + said.stdout).splitlines() if "version" in line), ""
        )

    def program(self, engine: str, name: str) -> str:
        """A program in the engine's home, or in its ``bin``."""
        home = self._home(engine)
        for path in (home / "bin" / name, home / name):
            if path.is_file():
                return str(path)
        raise Absent(f"no {name} below {home}")

    def _home(self, engine: str) -> Path:
        if engine not in self.homes:
            variable = variable_of(engine)
            raise Absent(f"{engine} is not installed (--peer {engine}=FOLDER or ${variable})")
        return self.homes[engine]

    def python(self, engine: str) -> str:
        """The interpreter that has it."""
        return sys.executable if engine == "headrace" else self.program(engine, "python")

    def environment(self, engine: str, cache_gib: int = CACHE_GIB) -> dict[str, str]:
        """What each engine is best with, found by trying."""
        common = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if engine == "vllm":
            # Its own default binds one thread only and keeps a core for the server.
            return common | {
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.num_threads - 1}",
                "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
                "THP_MEM_ALLOC_ENABLE": "1",
                "LD_PRELOAD": ":".join(self._preloads()),
            }
        if engine == "openvino":
            return common | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        if engine == "transformers":
            return common | {"THP_MEM_ALLOC_ENABLE": "1"}
        return common

    def _preloads(self) -> list[str]:
        found = []
        name = ctypes.util.find_library("tcmalloc_minimal")
        if name is not None:
            found.append(name)
        openmp = self._home("vllm") / "lib" / "libiomp5.so"
        if openmp.is_file():
            found.append(str(openmp))
        return found


def _serve_headrace(peers: Peers, path: str, port: str) -> list[str]:
    return [sys.executable, "-m", "headrace", "serve", path, "--port", port, "--dtype", "bfloat16",
            "--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(CACHE_GIB << 30),
            "--max-num-seqs", "64", "--disable-uvicorn-access-log"]  # fmt: skip


def _serve_vllm(peers: Peers, path: str, port: str) -> list[str]:
    return [peers.program("vllm", "vllm"), "serve", path, "--host", "127.0.0.1", "--port", port,
            "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64",
            "--disable-uvicorn-access-log", "--no-enable-log-requests"]  # fmt: skip


def _serve_openvino(peers: Peers, path: str, port: str) -> list[str]:
    script = str(DRIVEN / "openvino_server.py")
    return [peers.program("openvino", "python"), script, path, port, str(CACHE_GIB)]


def _serve_llamacpp(peers: Peers, path: str, port: str) -> list[str]:
    # One cache for all slots; the size that it needs is added by the caller, who knows the model.
    threads = str(peers.num_threads)
    return [peers.program("llamacpp", "llama-server"), "-m", path, "--host", "127.0.0.1", "--port", port,
            "-np", "64", "--kv-unified", "-t", threads, "-fa", "on"]  # fmt: skip


SERVERS: Mapping[str, Callable[[Peers, str, str], list[str]]] = {
    "headrace": _serve_headrace,
    "headrace-before": _serve_headrace,
    "vllm": _serve_vllm,
    "openvino": _serve_openvino,
    "llamacpp": _serve_llamacpp,
}


def variable_of(engine: str) -> str:
    """The environment variable that names an engine's home."""
    return "HEADRACE_BENCH_" + engine.upper().replace("-", "_")


def homes(words: list[str]) -> dict[str, Path]:
    """Homes from ``NAME=FOLDER`` words and the environment; the words win.

    Raises:
        ValueError: a name that is no engine's, or a folder that is not there.
    """
    found = {e: Path(os.environ[variable_of(e)]) for e in HOMES if variable_of(e) in os.environ}
    for word in words:
        name, _, folder = word.partition("=")
        if name not in HOMES or name == "headrace" or not folder:
            known = ", ".join(e for e in HOMES if e != "headrace")
            raise ValueError(f"--peer {word!r}: must be NAME=FOLDER with a name of {known}")
        found[name] = Path(folder)
    for name, path in found.items():
        if not path.is_dir():
            raise ValueError(f"the home of {name}, {str(path)!r}, is no folder")
    return found


def client() -> list[str]:
    """``headrace bench serve``, the client of all servers."""
    return [sys.executable, "-m", "headrace", "bench", "serve"]


def _quantized(precision: str) -> dict[str, str]:
    return {} if precision in ("bf16", *BLOCKS, *PACKED) else {"quantization": precision}


def unset(engine: str) -> tuple[str, ...]:
    """Variables that an engine must not see: peers neither our sources nor our thread setting."""
    return () if engine == "headrace" else ("PYTHONPATH", "OMP_NUM_THREADS")
