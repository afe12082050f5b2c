"""``headrace plugins check MODEL``: whether a model's class does what its interfaces promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser
from headrace.engine_args import EngineArgs
from headrace_core.declared_speech import DeclaredSpeech
from headrace_core.model import ModelInfo
from headrace_core.testing.speech import CHECKS, Check, silence, tasks_of

if TYPE_CHECKING:
    from headrace.assembly.inspection import Inspection

FAILED = 7
"""Exit status, that of plug-ins which do not import."""


def main(words: Sequence[str]) -> int:
    parser = Parser(
        prog="headrace plugins check",
        description="Run the conformance suite of speech to text on the class that serves a model, and "
        "say what is supported. No weights are loaded.",
    )
    parser.add_argument("model_tag", metavar="MODEL", help="folder or hub name")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(words)
    args.model = args.model_tag
    from headrace.assembly.inspection import inspect_model

    found = inspect_model(EngineArgs.from_cli_args(args).create_engine_config())
    print(found)
    print()
    return _run_suite(found)


def _run_suite(found: Inspection) -> int:
    """Print each check's outcome; returns the exit status."""
    from headrace.assembly.transcription import model_class
    from headrace_core.speech_diagnosis import comes_close, faults

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
    num_failed = sum(not _passes(check, model, found.info, speech) for check in CHECKS)
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
    """What clients get of it."""
    forms = "json, text"
    if speech.segment_timestamps:
        forms += ", srt, vtt, verbose_json"
    task = tasks_of(speech)[0]
    config, probe = speech.config(task), speech.language_probe(silence(speech.config(task)))
    length = "any length" if config.max_audio_clip_s is None else f"{config.max_audio_clip_s:g} s"
    longer = "cut" if config.allow_audio_chunking else "refused"
    rows = {
        "tasks": ", ".join(tasks_of(speech)),
        "languages": ", ".join(sorted(speech.languages)),
        "finds the language": "yes" if probe is not None else "no",
        "response formats": forms,
        "clips": f"{length} of {config.sample_rate} Hz; what is longer is {longer}",
        "knows of silence": "yes" if speech.no_speech_token_id is not None else "no",
    }
    return "\n".join(f"{title:<20}{text}" for title, text in rows.items())
