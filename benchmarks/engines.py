"""How each engine is driven offline: token ids in, token ids out, greedy, end tokens ignored.

Imports are inside the classes: a worker runs in one engine's environment, where the others are absent.
"""

from __future__ import annotations

from typing import Any, Protocol

from workloads import Request


class Engine(Protocol):
    """One engine with a model loaded."""

    def run(self, requests: list[Request]) -> list[int]:
        """Serve all at once; returns the number of tokens that each got."""
        ...


class LLMStyle:
    """headrace, and vLLM, whose offline API has the same form."""

    def __init__(self, module: str, model: str, dtype: str, **settings: Any) -> None:
        import importlib

        self._module = importlib.import_module(module)
        self._llm = self._module.LLM(model=model, dtype=dtype, max_model_len=4096, **settings)

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
    """transformers' own generate, left-padded batches of equal output length one after the other."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        ).eval()

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

    def __init__(self, model: str, dtype: str) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        config = openvino_genai.SchedulerConfig()
        config.cache_size = 4
        config.max_num_batched_tokens = 2048
        config.max_num_seqs = 64
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU")

    def run(self, requests: list[Request]) -> list[int]:
        configs = []
        for request in requests:
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = (
                request.num_tokens,
                True,
                False,
            )
            configs.append(config)
        ids = [
            self._openvino.Tensor(self._numpy.array([r.prompt], dtype="int64")) for r in requests
        ]
        return [len(r.m_generation_ids[0]) for r in self._pipeline.generate(ids, configs)]


def make(name: str, model: str, dtype: str) -> Engine:
    """An engine by name."""
    if name == "headrace":
        return LLMStyle("headrace", model, dtype, skip_tokenizer_init=True, use_tqdm_on_load=False)
    if name == "vllm":
        return LLMStyle("vllm", model, dtype)
    if name == "transformers":
        return Transformers(model, dtype)
    if name == "openvino":
        return OpenVINO(model, dtype)
    raise ValueError(f"no engine {name!r}: headrace, vllm, transformers or openvino")
