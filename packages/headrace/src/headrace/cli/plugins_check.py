"""``headrace plugins check MODEL``: whether a model's class does what its interfaces promise."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser
from headrace.assembly.speech.declared import DeclaredSpeech
from headrace.engine_args import EngineArgs
from headrace_core.errors import MissingDependency
from headrace_core.model import ModelInfo

if TYPE_CHECKING:
    from headrace.assembly.inspection import Inspection
    from headrace_testing.model.speech import Check

FAILED = 7
"""Exit status, that of plug-ins which do not import."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="headrace plugins check",
        description="Run the speech-to-text conformance suite on the class that serves a model, and "
        "report what it supports. Loads no weights.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="folder or hub name")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(argv)
    args.model = args.model_tag
    _suite()
    from headrace.assembly.inspection import inspect_model

    found = inspect_model(EngineArgs.from_cli_args(args).create_engine_config())
    print(found)
    print()
    return _run_suite(found)


def _suite() -> ModuleType:
    """The suite that plug-ins of speech to text inherit; a development package has it.

    Raises:
        MissingDependency: headrace-testing is not installed.
    """
    try:
        from headrace_testing.model import speech
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "headrace-testing",
            needed_for="headrace plugins check",
            install="pip install headrace-testing",
        ) from error
    return speech


def _run_suite(found: Inspection) -> int:
    """Print each check's outcome; returns the exit status."""
    from headrace.assembly.speech.transcription import model_class
    from headrace_core.speech.diagnosis import comes_close, faults

    model: type[Any] = model_class(found.info)
    if not comes_close(model):
        print(f"{model.__qualname__} has nothing of SupportsTranscription: nothing to check")
        return 0
    lacking = dict.fromkeys([*faults(model), *found.model.unmet.get("transcription", ())])
    for reason in lacking:
        print(f"FAILS  {reason}")
    if faults(model):
        return FAILED
    speech = DeclaredSpeech(model, found.info)
    checks = _suite().CHECKS
    num_failed = sum(not _passes(check, model, found.info, speech) for check in checks)
    if not num_failed:
        print(f"\n{_supported(speech)}")
    return FAILED if num_failed or lacking else 0


def _passes(check: Check, model: type, info: ModelInfo, speech: DeclaredSpeech) -> bool:
    """Run one check, and print what came of it."""
    title = check.__name__.replace("_", " ")
    try:
        check(model, info, speech)
    except Exception as error:  # whatever a foreign class raises
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        print(f"FAILS  {title}: {kind}{error}")
        return False
    print(f"ok     {title}")
    return True


def _supported(speech: DeclaredSpeech) -> str:
    """Features that clients get from the class."""
    forms = "json, text"
    if speech.segment_timestamps:
        forms += ", srt, vtt, verbose_json"
    tasks = _suite().tasks_of(speech)
    config = speech.config(tasks[0])
    probe = speech.language_probe(_suite().silence(config))
    length = "any length" if config.max_audio_clip_s is None else f"{config.max_audio_clip_s:g} s"
    longer = "cut" if config.allow_audio_chunking else "refused"
    rows = {
        "tasks": ", ".join(tasks),
        "languages": ", ".join(sorted(speech.languages)),
        "finds the language": "yes" if probe is not None else "no",
        "response formats": forms,
        "clips": f"{length} of {config.sample_rate} Hz; what is longer is {longer}",
        "knows of silence": "yes" if speech.no_speech_token_id is not None else "no",
    }
    return "\n".join(f"{title:<20}{text}" for title, text in rows.items())
