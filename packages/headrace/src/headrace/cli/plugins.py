"""``headrace plugins``: what is installed under each role, whether it imports, and whether a model's class
does what its interfaces promise (``headrace plugins check MODEL``)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.arguments import Parser
from headrace_core import plugins
from headrace_core.errors import PluginError


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "check":
        from headrace.cli.plugins_check import main as check

        return check(argv[1:])
    parser = Parser(
        prog="headrace plugins",
        description="List installed plug-ins by role. Nothing is imported unless --check is given.",
        epilog="headrace plugins check MODEL: run the speech-to-text conformance suite on the class "
        "that serves a model.",
    )
    parser.add_argument("group", nargs="?", help="only this role, e.g. models or headrace.models")
    parser.add_argument(
        "--check", action="store_true", help="import each plug-in and report failures"
    )
    args = parser.parse_args(argv)
    groups = list(plugins.GROUPS)
    if args.group:
        wanted = args.group if args.group.startswith("headrace.") else f"headrace.{args.group}"
        if wanted not in groups:
            parser.error(f"no role {args.group!r}; roles are {', '.join(g[9:] for g in groups)}")
        groups = [wanted]
    if args.check:
        plugins.run_general()
    failures = sum(_print_group(group, check=args.check) for group in groups)
    return 7 if failures else 0


def _print_group(group: str, *, check: bool) -> int:
    """Print one role; returns how many plug-ins failed to import."""
    found = plugins.installed(group)
    print(f"{group}  ({plugins.GROUPS[group]})")
    failures = 0
    for name, plugin in found.items():
        state = ""
        if check:
            try:
                plugin.load()
                state = "  ok"
            except PluginError as error:
                failures += 1
                state = f"  FAILS: {error.__cause__}"
        print(f"  {name:<28} {plugin.target:<58} {plugin.distribution}{state}")
    if not found:
        print("  none")
    return failures
