"""``headrace route``: one address for several servers, which sends a request where its prefix is cached."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser, flag_name, options_of
from headrace.interrupts import ending_at_once
from headrace_core.errors import MissingDependency

if TYPE_CHECKING:
    from headrace_server.router.prefixes import PrefixKnowledge
    from headrace_server.router.settings import RouterSettings
    from headrace_server.settings import ServerSettings

EPILOG = """\
Two servers and a router in front of them:
  headrace serve MODEL --port 8001 &
  headrace serve MODEL --port 8002 &
  headrace route --server http://127.0.0.1:8001 --server http://127.0.0.1:8002
Clients use http://127.0.0.1:8000 as if it were one server.

A server gets a request if it has seen the longest part of its beginning, unless it has
--max-imbalance times as many requests in flight as the least busy one. A server that dies is
noticed within --health-interval; its requests go to another one if their answers have not begun.
Prompts may be computed by other servers than those that answer (docs/kv-transfer.md):
  headrace serve MODEL --port 8001 --kv-transfer-config '{"kv_connector": "p2p", "kv_role": "kv_producer"}' &
  headrace serve MODEL --port 8002 --kv-transfer-config '{"kv_connector": "p2p", "kv_role": "kv_consumer"}' &
  headrace route --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

Take one out before an upgrade (with a key, or --dev-mode on your own machine):
  curl -X POST localhost:8000/router/drain -H 'Content-Type: application/json' \\
    -d '{"server": "http://127.0.0.1:8001"}'
"""


def main(argv: Sequence[str]) -> int:
    with ending_at_once():
        args = make_parser().parse_args(argv)
        router, settings = settings_from(args)
        _log(settings)
        from headrace_server.router.app import create_router_app
        from headrace_server.router.prefixes import SentPrefixes
        from headrace_server.router.servers import ServerPool
        from headrace_server.run import bind, run
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(contextlib.closing(bind(settings)))
        prefixes = stack.enter_context(knowing_prefixes(router))
        key = router.key_of_servers()
        pool, prefilling = ServerPool(router, prefixes, key), None
        if router.prefill:
            seen = SentPrefixes(router.prefix_entries)
            prefilling = ServerPool(router, seen, key, prefills=True)
        return run(create_router_app(pool, settings, prefilling), listening, settings)


def make_parser() -> Parser:
    """The parser of ``headrace route``.

    Raises:
        MissingDependency: the server's package is not installed.
    """
    parser = Parser(
        prog="headrace route",
        description="Serve several servers at one address: requests go where their prefix is cached.",
        epilog=EPILOG,
    )
    try:
        from headrace_server.router.settings import FRONTEND, RouterSettings
        from headrace_server.settings import ServerSettings
    except ImportError as error:
        raise MissingDependency(
            error.name or "headrace-server",
            needed_for="headrace route",
            install="pip install 'headrace[all]'",
        ) from error
    parser.add_config(RouterSettings, "Router")
    parser.add_config(ServerSettings, "Frontend", FRONTEND)
    return parser


def settings_from(args: Namespace) -> tuple[RouterSettings, ServerSettings]:
    """The settings of a parsed command line.

    Raises:
        ConfigError: naming the setting.
    """
    from headrace_server.router.settings import FRONTEND, RouterSettings
    from headrace_server.settings import ServerSettings, from_environment

    router = RouterSettings(**_given(args, RouterSettings, None))
    own = _given(args, ServerSettings, FRONTEND) | {
        name: value for name, value in from_environment(os.environ).items() if name in FRONTEND
    }
    # Documents about the API are the servers', which know their routes.
    return router, ServerSettings(**own, disable_fastapi_docs=True)


def _given(args: Namespace, config: type, only: frozenset[str] | None) -> dict[str, Any]:
    values = {}
    for option in options_of(config):
        if only is None or option.name in only:
            value = getattr(args, flag_name(option))
            values[option.name] = tuple(value) if isinstance(value, list) else value
    return values


def _log(settings: ServerSettings) -> None:
    from headrace.logs import configure, queue_prints

    configure(log_format=settings.log_format, config_file=settings.log_config_file)
    queue_prints()


@contextlib.contextmanager
def knowing_prefixes(router: RouterSettings) -> Iterator[PrefixKnowledge]:
    """What knows which server has which prefix, for the time of the block."""
    from headrace_server.router.prefixes import SentPrefixes

    sent = SentPrefixes(router.prefix_entries)
    if not router.kv_events:
        yield sent
        return
    from headrace.routing.cached_prefixes import CachedPrefixes

    with CachedPrefixes(router, sent) as cached:
        yield cached
