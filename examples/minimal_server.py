"""The streaming engine behind an HTTP route of your own. A demonstration: `headrace serve` is the server.

    pip install 'headrace[all]'
    python examples/minimal_server.py                    # the demo model, http://127.0.0.1:8100
    curl -s localhost:8100/generate -H 'Content-Type: application/json' \
        -d '{"prompt": "Hello", "max_tokens": 16}'       # {"text": ["..."]}
    curl -sN ... -d '{"prompt": "Hello", "stream": true}' # one JSON line each time there is more

Every other field of the body is a sampling parameter.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from headrace import AsyncEngineArgs, AsyncLLM, SamplingParams


def make_app(llm: AsyncLLM) -> FastAPI:
    """One route over a running engine."""
    app = FastAPI()

    @app.post("/generate", response_model=None)
    async def generate(request: Request) -> dict[str, list[str]] | StreamingResponse:
        fields: dict[str, Any] = await request.json()
        prompt, stream = fields.pop("prompt"), fields.pop("stream", False)
        try:
            params = SamplingParams(**fields)
            outputs = llm.generate(prompt, params, uuid.uuid4().hex)
            first = await anext(outputs)
        except (TypeError, ValueError) as error:  # an unknown or a wrong parameter
            raise HTTPException(400, str(error)) from error

        async def texts() -> AsyncIterator[list[str]]:
            yield [completion.text for completion in first.outputs]
            async for output in outputs:
                yield [completion.text for completion in output.outputs]

        if stream:
            # Leaving early closes the iterator, and with it the request.
            lines = (json.dumps({"text": text}) + "\n" async for text in texts())
            return StreamingResponse(lines, media_type="application/x-ndjson")
        last = [text async for text in texts()][-1]
        return {"text": last}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name; default: the demo model")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=args.model))
    uvicorn.run(make_app(llm), host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
