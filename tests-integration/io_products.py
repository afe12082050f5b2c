"""An IO processor, and the function that a package would register for it."""

from __future__ import annotations

from typing import Any

import torch

from headrace_core.pooling.io_processor import IOProcessor, IOProcessorResponse


class Products(IOProcessor):
    """Text -> three prompts -> products of their embeddings."""

    def parse_request(self, request: Any) -> str:
        if not isinstance(request, str):
            raise ValueError("data must be text")
        return request

    def pre_process(self, prompt: Any, request_id: str | None = None, **_: Any) -> list[str]:
        return [prompt, " ".join(prompt.split()[::-1]), prompt + prompt]

    def post_process(self, model_output: Any, request_id: str | None = None, **_: Any) -> Any:
        first, *others = (torch.tensor(output.outputs.data.tolist()) for output in model_output)
        return [float(first @ other) for other in others]

    def output_to_response(self, output: Any) -> IOProcessorResponse:
        return IOProcessorResponse(output)


def products() -> str:
    """The class's name."""
    return "io_products.Products"
