"""How each engine is driven offline: token ids in, token ids out, greedy, end tokens ignored.

Imports are inside the classes: a worker runs in one engine's environment, where the others are absent.
"""

from __future__ import annotations

import http.client
import importlib
import json
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, Protocol
from urllib.parse import urlsplit

from workloads import Request

Settings = Mapping[str, Any]
"""``model`` (a path), and what else an engine wants."""


class Engine(Protocol):
    """One engine with a model loaded."""

    version: str

    def run(self, requests: list[Request]) -> list[int]:
        """Serve all at once; returns the number of tokens that each got."""
        ...


class LLMStyle:
    """headrace, and vLLM, whose offline API has the same form."""

    def __init__(self, module: str, settings: Settings) -> None:
        self._module = importlib.import_module(module)
        self._llm = self._module.LLM(**settings)
        self.version = str(self._module.__version__)

    def run(self, requests: list[Request]) -> list[int]:
        params = [
            self._module.SamplingParams(
                temperature=0.0, max_tokens=r.num_tokens, ignore_eos=True, detokenize=False
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """transformers' own generate, one request after the other (its batches pad; see the docs)."""

    def __init__(self, settings: Settings) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        )
        self._model.eval()
        self.version = transformers.__version__

    def run(self, requests: list[Request]) -> list[int]:
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> int:
        ids = self._torch.tensor([request.prompt])
        with self._torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), do_sample=False,
                max_new_tokens=request.num_tokens, min_new_tokens=request.num_tokens, pad_token_id=0,
            )  # fmt: skip
        return int(out.shape[1]) - len(request.prompt)


class OpenVINO:
    """OpenVINO GenAI's continuous batching pipeline over a converted model."""

    def __init__(self, settings: Settings) -> None:
        import numpy
        import openvino

        self._numpy, self._openvino = numpy, openvino
        self._genai = importlib.import_module("openvino_genai")
        self._pipeline = openvino_pipeline(settings["model"], settings["cache_gib"])
        self.version = metadata.version("openvino-genai")

    def run(self, requests: list[Request]) -> list[int]:
        configs = []
        for request in requests:
            config = self._genai.GenerationConfig()
            config.max_new_tokens = request.num_tokens
            config.ignore_eos, config.do_sample = True, False
            configs.append(config)
        ids = [
            self._openvino.Tensor(self._numpy.array([r.prompt], dtype="int64")) for r in requests
        ]
        return [len(r.m_generation_ids[0]) for r in self._pipeline.generate(ids, configs)]


def openvino_pipeline(model: str, cache_gib: int) -> Any:
    """The pipeline with the settings that serve it best here."""
    genai = importlib.import_module("openvino_genai")
    config = genai.SchedulerConfig()
    config.cache_size = cache_gib
    config.max_num_batched_tokens = 2048
    config.max_num_seqs = 64
    config.dynamic_split_fuse = True
    config.enable_prefix_caching = True
    return genai.ContinuousBatchingPipeline(model, config, "CPU", {})


class LlamaCpp:
    """llama.cpp by its Python bindings, one request after the other (its batches need its server)."""

    def __init__(self, settings: Settings) -> None:
        llama_cpp = importlib.import_module("llama_cpp")
        self._llama = llama_cpp.Llama(
            model_path=settings["model"], n_ctx=settings["num_cache_tokens"],
            n_threads=settings["num_threads"], n_threads_batch=settings["num_threads"],
            flash_attn=True, verbose=False,
        )  # fmt: skip
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def run(self, requests: list[Request]) -> list[int]:
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> int:
        self._llama.reset()
        made: list[int] = []
        for _ in range(request.num_tokens):
            self._llama.eval(made[-1:] or request.prompt)
            made.append(self._llama.sample(temp=0.0))
        return len(made)


class Server:
    """Any server's ``/v1/completions``, all requests of a batch at once, whole answers."""

    def __init__(self, settings: Settings) -> None:
        self._url = urlsplit(settings["url"])
        with urllib.request.urlopen(settings["url"] + "/v1/models", timeout=60) as response:
            self._model = json.load(response)["data"][0]["id"]
        self.version = settings.get("version", "")

    def run(self, requests: list[Request]) -> list[int]:
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            return list(pool.map(self._one, requests))

    def _one(self, request: Request) -> int:
        body = {
            "model": self._model, "prompt": request.prompt, "max_tokens": request.num_tokens,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        assert self._url.hostname is not None
        connection = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=1200)
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})  # fmt: skip
        answer = json.load(connection.getresponse())
        connection.close()
        if "usage" not in answer:
            raise RuntimeError(f"the server answered {str(answer)[:300]}")
        return int(answer["usage"]["completion_tokens"])


ENGINES: Mapping[str, Callable[[Settings], Engine]] = {
    "headrace": lambda settings: LLMStyle("headrace", settings),
    "vllm": lambda settings: LLMStyle("vllm", settings),
    "transformers": Transformers,
    "openvino": OpenVINO,
    "llamacpp": LlamaCpp,
    "server": Server,
}


def make(name: str, settings: Settings) -> Engine:
    """An engine by name."""
    if name not in ENGINES:
        raise ValueError(f"no engine {name!r}: must be one of {', '.join(ENGINES)}")
    return ENGINES[name](settings)
