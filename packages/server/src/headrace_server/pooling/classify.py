"""One call of ``/classify``: prompts to labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headrace_core.output import PoolingOutput, PoolingRequestOutput
from headrace_server.pooling.call import PoolingCall
from headrace_server.pooling.inputs import inputs_of
from headrace_server.protocols.openai.bodies.pooling import ClassifyChatRequest, ClassifyTextRequest
from headrace_server.state import ServerState

Outputs = Sequence[PoolingRequestOutput[PoolingOutput]]


class Classification(PoolingCall):
    """Checks a request when made; then :meth:`respond`, once.

    Raises:
        RequestError: naming the field.
    """

    def __init__(
        self, body: ClassifyTextRequest | ClassifyChatRequest, request: Request, state: ServerState
    ) -> None:
        super().__init__(body, request, state, "classify-")
        self._inputs = inputs_of(body, state)
        self.spelling: Mapping[str, str] = dict.fromkeys(
            ("prompt", "prompt_token_ids"), self._inputs.field
        )

    async def respond(self) -> Response:
        prompts, special, _ = self._inputs
        outputs = await self.encode_each(prompts, "classify", special)
        count = sum(output.outputs.data.shape[-1] for output in outputs)
        return self.list_of(self._items(outputs), outputs, count)

    def _items(self, outputs: Outputs) -> Iterator[dict[str, Any]]:
        for index, output in enumerate(outputs):
            probs: list[float] = output.outputs.data.tolist()
            label = self._label(max(range(len(probs)), key=probs.__getitem__))
            item = {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
            yield item | self.ids_of(output)

    def _label(self, position: int) -> str | None:
        labels = self.model.pooling.labels if self.model.pooling is not None else ()
        return labels[position] if position < len(labels) else None
