"""What servers have cached, from their KV events: a router that restarts knows it at once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from types import TracebackType

import msgspec

from headrace_engine.kv.event_subscriber import KVEventSubscriber
from headrace_engine.kv.events import CachedBlocks
from headrace_server.router.prefixes import PromptText, Score, SentPrefixes
from headrace_server.router.settings import KVEventAddress, RouterSettings
from headrace_server.router.upstream import Upstream, UpstreamError

logger = logging.getLogger(__name__)

TOKENIZED = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose bodies ``/tokenize`` reads, too. Of others only what was sent is known."""
FIELDS = frozenset({
    "model", "messages", "prompt", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens",
})  # fmt: skip
"""Fields of a body that change its prompt's tokens."""
MAX_BODY = 1 << 20
"""Bytes of a body beyond which nothing is tokenized: media, most likely."""
MAX_ANSWER = 64 << 20
TOKENIZE_SECONDS = 2.0
"""Longest wait for a prompt's tokens."""
_POLL_SECONDS = 0.2


class CachedPrefixes:
    """See :class:`headrace_server.router.prefixes.PrefixKnowledge`.

    A server's score is the tokens of the prompt that it has cached, then what was sent there: blocks of
    requests that have just begun are not announced yet. A prompt's tokens are asked of a server, as only
    servers have the model's tokenizer and chat template.

    Args:
        settings: of the router.
        sent: what was sent where.
    """

    def __init__(self, settings: RouterSettings, sent: SentPrefixes) -> None:
        urls = settings.servers
        self._sent = sent
        self._key = settings.key_of_servers()
        self._upstreams = {url: Upstream(url, settings.connect_timeout) for url in urls}
        self._mirrors = {
            url: _Mirror(url, address) for url, address in zip(urls, settings.event_addresses)
        }

    def __enter__(self) -> CachedPrefixes:
        for mirror in self._mirrors.values():
            mirror.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for mirror in self._mirrors.values():
            mirror.stop()

    async def scores(self, prompt: PromptText, servers: Sequence[str]) -> list[Score]:
        """See :meth:`~headrace_server.router.prefixes.PrefixKnowledge.scores`."""
        tokens = await self._tokens(prompt, servers)
        return [
            (
                float(self._mirrors[server].num_cached(tokens)) if tokens else 0.0,
                float(self._sent.num_seen(prompt, server)),
            )
            for server in servers
        ]

    def sent(self, prompt: PromptText, server: str) -> None:
        """See :meth:`~headrace_server.router.prefixes.PrefixKnowledge.sent`."""
        self._sent.sent(prompt, server)

    def forget(self, server: str) -> None:
        """See :meth:`~headrace_server.router.prefixes.PrefixKnowledge.forget`. Its events say the rest."""
        self._sent.forget(server)

    async def _tokens(self, prompt: PromptText, servers: Sequence[str]) -> list[int]:
        """The prompt's token ids; [] if nobody says them."""
        body = _tokenize_body(prompt)
        if body is None or len(servers) < 2:
            return []
        headers = [(b"content-type", b"application/json")]
        key = f"Bearer {self._key}".encode() if self._key else prompt.authorization
        if key:
            headers.append((b"authorization", key))
        for server in servers[:2]:
            try:
                async with asyncio.timeout(TOKENIZE_SECONDS):
                    came = await self._upstreams[server].request(
                        "POST", b"/tokenize", headers, body
                    )
                    try:
                        answer = await came.read(MAX_ANSWER)
                    finally:
                        came.close()
            except (UpstreamError, TimeoutError) as error:
                logger.debug("%s: no tokens: %s", server, error)
                continue
            return _token_ids(answer) if came.status == 200 else []
        return []


class _Answer(msgspec.Struct):
    tokens: list[int]


def _token_ids(answer: bytes) -> list[int]:
    try:
        return msgspec.json.decode(answer, type=_Answer).tokens
    except msgspec.MsgspecError:
        return []


def _tokenize_body(prompt: PromptText) -> bytes | None:
    """The body by which ``/tokenize`` gives a request's prompt; None: it cannot."""
    if prompt.path not in TOKENIZED or len(prompt.body) > MAX_BODY:
        return None
    try:
        given = msgspec.json.decode(prompt.body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return None
    if "prompt" in given and not bytes(given["prompt"]).startswith(b'"'):
        return None  # several prompts, or token ids
    return msgspec.json.encode({name: value for name, value in given.items() if name in FIELDS})


class _Mirror:
    """The blocks of one server, kept up by a thread of its own."""

    def __init__(self, url: str, address: KVEventAddress) -> None:
        self._url = url
        self._address = address
        self._blocks = CachedBlocks()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-kv-mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)

    def num_cached(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest cached prefix."""
        with self._lock:
            return self._blocks.num_cached_tokens(tokens)

    def _run(self) -> None:
        with KVEventSubscriber(*self._address) as subscriber:
            while not self._stopping.is_set():
                for batch in subscriber.poll(_POLL_SECONDS):
                    with self._lock:
                        self._blocks.apply(batch)
