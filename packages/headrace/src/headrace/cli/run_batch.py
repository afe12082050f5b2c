"""``headrace run-batch``: a file of requests to a file of answers, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import signal
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser, flag_name, options_of
from headrace.cli.serve import structured_outputs
from headrace.engine_args import EngineArgs
from headrace.logs import configure
from headrace_core.errors import EngineDead, MissingDependency, NetworkError

if TYPE_CHECKING:
    import socket

    from headrace.batch.journal import Journal
    from headrace.batch.lines import BatchInput
    from headrace.batch.runner import BatchCounts
    from headrace_engine.config import EngineConfig
    from headrace_server.settings import ServerSettings

logger = logging.getLogger("headrace")

SETTINGS = frozenset(
    {
        "response_role", "chat_template", "chat_template_content_format",
        "trust_request_chat_template", "default_chat_template_kwargs",
        "exclude_tools_when_tool_choice_none", "enable_auto_tool_choice", "tool_call_parser",
        "tool_parser_plugin", "reasoning_parser", "reasoning_parser_plugin",
        "return_tokens_as_token_ids", "enable_prompt_tokens_details",
        "enable_force_include_usage", "strict_requests", "enable_log_requests", "max_log_len",
        "metrics_prefix", "lora_modules",
    }
)  # fmt: skip
"""The server's settings that mean something to a batch."""
MOST_SHOWN = 20
"""Lines that are named before the batch; of others the number is said."""


def main(argv: Sequence[str]) -> int:
    from headrace.assembly.templates import check_template

    args = make_parser().parse_args(argv)
    configure()
    settings = settings_from(args)
    check_template(settings)
    args.structured_outputs_config = structured_outputs(settings, args.structured_outputs_config)
    engine_args = EngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config()
    from headrace import __version__
    from headrace_server.parsing.registry import load_parsers

    load_parsers(settings)  # before the file is read, and a model

    logger.info(
        "headrace %s run-batch: %s to %s; non-default engine settings: %s", __version__,
        _shown(args.input_file), _shown(args.output_file), engine_args.settings,
    )  # fmt: skip
    _check_offline(args)
    with tempfile.TemporaryDirectory(prefix="headrace-batch-") as folder:
        try:
            return _run(args, config, settings, Path(folder))
        except asyncio.CancelledError:
            logger.warning("stopped; run the same command to go on")
            return 143


def _check_offline(args: Namespace) -> None:
    """Raises: NetworkError: a file is behind a URL, and nothing may be fetched."""
    from headrace.batch.transfer import is_url

    for field in ("input_file", "output_file"):
        name = getattr(args, field)
        if args.offline and is_url(name):
            raise NetworkError(
                f"{field} = {_shown(name)!r}: offline = True: must be a file", field=field
            )


def make_parser() -> Parser:
    """The parser of ``headrace run-batch``."""
    parser = Parser(
        prog="headrace run-batch",
        description="Answer a file of requests. Each line is a JSON object with custom_id, method "
        "(POST), url (/v1/chat/completions, ...) and body. Running the same command again resumes an "
        "interrupted batch.",
        epilog="Try: headrace run-batch -i requests.jsonl -o answers.jsonl",
    )
    _add_arguments(parser)
    try:
        from headrace_server.settings import ServerSettings
    except ImportError as error:
        raise MissingDependency(
            error.name or "headrace-server",
            needed_for="headrace run-batch",
            install="pip install 'headrace[all]'",
        ) from error
    parser.add_config(ServerSettings, "Frontend", SETTINGS)
    return EngineArgs.add_cli_args(parser)


def _add_arguments(parser: Parser) -> None:
    """Add the flags that only this command has."""
    parser.add_model()
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests: a path (a pipe, too), or a URL to GET",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers: a path, or a URL to PUT",
    )
    parser.add_argument(
        "--output-tmp-dir", metavar="FOLDER",
        help="folder that keeps the answers until they are sent to a URL; without it an interrupted "
        "batch with such an output starts from the beginning",
    )  # fmt: skip
    parser.add_argument(
        "--max-concurrency", type=_at_least_one, metavar="N",
        help="most requests at the same time (default: twice the requests of one step)",
    )  # fmt: skip
    parser.add_argument(
        "--restart", action="store_true", help="discard the results of an interrupted run"
    )
    parser.add_argument(
        "--enable-metrics", action="store_true", help="serve /metrics while the batch runs"
    )
    parser.add_argument("--url", default="127.0.0.1", help="address of /metrics")
    parser.add_argument("--port", type=int, default=8000, help="port of /metrics")


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def settings_from(args: Namespace) -> ServerSettings:
    """The server's settings from a parsed command line.

    Answers carry their request's id. The application may ask for a key (the environment can hold
    one); the batch has its own.
    """
    from headrace_server.settings import ServerSettings

    key = secrets.token_hex(32)
    values: dict[str, Any] = {"enable_request_id_headers": True, "api_key": (key,)}
    for option in options_of(ServerSettings):
        if option.name in SETTINGS:
            value = getattr(args, flag_name(option))
            values[option.name] = tuple(value) if isinstance(value, list) else value
    return ServerSettings(**values)


def _run(args: Namespace, config: EngineConfig, settings: ServerSettings, folder: Path) -> int:
    """Fetch, check, answer, deliver."""
    from headrace.batch import lines, transfer
    from headrace.batch.journal import Journal, is_stream

    source = Path(args.input_file)
    if transfer.is_url(args.input_file):
        source = folder / "input"
        asyncio.run(transfer.download(args.input_file, source))
    elif is_stream(source):  # what can be read once is read once: it is checked, and then answered
        source = transfer.keep(source, folder / "input")
    found = lines.scan(source)
    path = journal_path(args, folder)
    if args.restart:
        path.unlink(missing_ok=True)
    with Journal(path, found, config.model.model or "the demo model") as journal:
        if journal.num_resumed:
            logger.info("%d of %d requests are answered already", len(journal), found.num_lines)
        if len(journal) < found.num_lines:
            _warn_of_repeated(found)
            _answer(args, config, settings, source, journal, found)
        _deliver(args, journal, folder)
    return 0


def _warn_of_repeated(found: BatchInput) -> None:
    """Name the lines that are refused for their custom_id, before a model is loaded."""
    for number, first in list(found.repeated.items())[:MOST_SHOWN]:
        logger.warning("line %d: its custom_id is that of line %d; it is refused", number, first)
    if len(found.repeated) > MOST_SHOWN:
        logger.warning("%d lines are refused for their custom_id", len(found.repeated))


def journal_path(args: Namespace, folder: Path) -> Path:
    """Where answers are kept while the batch runs.

    Raises:
        ConfigError: the output is a folder, or the folder for it does not exist.
    """
    from headrace.batch.journal import journal_beside
    from headrace.batch.transfer import is_url

    if not is_url(args.output_file):
        source = None if is_url(args.input_file) else args.input_file
        return journal_beside(args.output_file, folder, source=source)
    if args.output_tmp_dir is None:
        return folder / "journal"
    # Without the query: presigned URLs have another one each time.
    name = hashlib.sha256(args.output_file.partition("?")[0].encode()).hexdigest()[:16]
    kept = Path(args.output_tmp_dir)
    kept.mkdir(parents=True, exist_ok=True)
    return kept / f"headrace-batch-{name}.partial"


def _answer(
    args: Namespace,
    config: EngineConfig,
    settings: ServerSettings,
    source: Path,
    journal: Journal,
    found: BatchInput,
) -> None:
    """Start the engine and answer what is left."""
    from headrace.assembly import connect, starting, templates_of

    with contextlib.ExitStack() as stack:
        listening = _metrics_socket(args, stack)
        with starting(whole_process=True) as timeline:
            with timeline.phase("import server"):
                from headrace_server.app import create_app
            engine = connect(config, templates_of(settings), timeline)
            app = create_app(engine, settings)
        show = stack.enter_context(_progress(found.num_lines, len(journal)))
        # Enough that a step is never short of requests.
        concurrency = args.max_concurrency or 2 * (config.scheduler.max_num_seqs or 128)
        asyncio.run(_serve(app, source, found, journal, concurrency, listening, show))


async def _serve(
    app: Any,
    source: Path,
    found: BatchInput,
    journal: Journal,
    concurrency: int,
    listening: socket.socket | None,
    show: Callable[[BatchCounts], None],
) -> None:
    from headrace.batch.inprocess import InProcess
    from headrace.batch.lines import requests
    from headrace.batch.metrics_server import serving_metrics
    from headrace.batch.runner import Runner
    from headrace_server.routes.availability import INFERENCE_ROUTES

    state = app.state.headrace

    def check() -> None:
        if state.engine.dead_error is not None:
            raise EngineDead("the engine has stopped; run the same command to go on")

    runner = Runner(
        InProcess(app),
        journal,
        paths=[path for path in INFERENCE_ROUTES if not path.startswith("/v1/audio/")],
        repeated=found.repeated,
        concurrency=concurrency,
        check=check,
        progress=show,
    )
    task = asyncio.current_task()
    assert task is not None
    # A stopped batch keeps what it has; in-flight requests end with the task.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        if state.adapters is not None:
            await state.adapters.start()
        async with serving_metrics(app, listening):
            counts = await runner.run(requests(source))
        logger.info(
            "%d requests answered, %d of them with an error", counts.completed, counts.failed
        )
    finally:
        await state.engine.shutdown()


def _deliver(args: Namespace, journal: Journal, folder: Path) -> None:
    """Put the answers where they were wanted; then the journal is not needed any more."""
    from headrace.batch import transfer

    if not transfer.is_url(args.output_file):
        journal.write_output(Path(args.output_file))
    else:
        output = folder / "output"
        journal.write_output(output)
        asyncio.run(transfer.upload(args.output_file, output))
    journal.remove()


def _metrics_socket(args: Namespace, stack: contextlib.ExitStack) -> socket.socket | None:
    if not args.enable_metrics:
        return None
    from headrace_server.run import bind
    from headrace_server.settings import ServerSettings

    listening = bind(ServerSettings(host=args.url, port=args.port))
    logger.info("metrics at http://%s:%d/metrics", *listening.getsockname()[:2])
    return stack.enter_context(contextlib.closing(listening))


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[BatchCounts], None]]:
    """A bar with percentage, count, elapsed and remaining time, and rate, where somebody looks."""
    from tqdm import tqdm

    with tqdm(total=total, initial=done, unit="req", disable=None) as bar:

        def show(counts: BatchCounts) -> None:
            bar.set_postfix(submitted=counts.submitted, failed=counts.failed, refresh=False)
            bar.update(done + counts.completed - bar.n)

        yield show


def _shown(name: str) -> str:
    """A file's name for the log: of a URL without its query, which may be a secret."""
    return name.partition("?")[0] if "://" in name else name
