"""Ask all models of a server the same question, side by side: the base model and each adapter.

    headrace serve /path/to/base --enable-lora --lora-modules sql=/path/to/sql chat=/path/to/chat
    python examples/lora_serving.py --prompt "How many users are there?"
    python examples/lora_serving.py --load extra=/path/to/extra --api-key "$HEADRACE_ADMIN_API_KEY"

The last one loads an adapter first, and unloads it in the end; the server must allow that
(HEADRACE_ALLOW_RUNTIME_LORA_UPDATING=1) and have a key.
"""

from __future__ import annotations

import argparse
import asyncio

import openai


async def main() -> None:
    args = _parser().parse_args()
    client = openai.AsyncOpenAI(base_url=args.url + "/v1", api_key=args.api_key)
    name, _, path = (args.load or "").partition("=")
    if name:
        loaded = {"lora_name": name, "lora_path": path}
        print(await client.post("/load_lora_adapter", body=loaded, cast_to=str))
    try:
        models = (await client.models.list()).data
        answers = (ask(client, model.id, args.prompt, args.max_tokens) for model in models)
        for model, answer in zip(models, await asyncio.gather(*answers), strict=True):
            parent = getattr(model, "parent", None)
            print(f"{model.id}{f' (adapter of {parent})' if parent else ''}: {answer!r}")
    finally:
        if name:
            print(await client.post("/unload_lora_adapter", body={"lora_name": name}, cast_to=str))


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> str:
    """What a model writes behind a prompt."""
    answer = await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--load", metavar="NAME=PATH", help="an adapter to load for this run")
    return parser


if __name__ == "__main__":
    asyncio.run(main())
