"""A speech model of a foreign package: it serves as it is, and with a member amiss it is told which."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest

from headrace.assembly import connect
from headrace.assembly.inspection import inspect_model
from headrace.cli.main import run
from headrace.engine_args import EngineArgs
from headrace_core import plugins
from headrace_core.errors import PluginLoadError, UnsupportedModel
from headrace_server import ServerSettings, create_app
from headrace_testing.fakes.engine import FakeEngine

EXAMPLE = Path(__file__).parents[1] / "examples" / "speech_plugin"
ARCHITECTURE = "SpeechExampleForCausalLM"
TRANSCRIBE = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's own."""
    spec = importlib.util.spec_from_file_location("make", EXAMPLE / "make_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("ears")
    module.make(folder)
    return folder


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install((old, new), ...)``: the example as a package, its class's source changed."""

    def make(*changes: tuple[str, str], processor: bool = True) -> None:
        package = tmp_path / "speech_example"
        package.mkdir()
        for file in (EXAMPLE / "src" / "speech_example").glob("*.py"):
            text = file.read_text(encoding="utf-8")
            if file.name == "model.py":
                for old, new in changes:
                    assert old in text, f"{old!r} is not in {file}"
                    text = text.replace(old, new)
            (package / file.name).write_text(text, encoding="utf-8")
        lines = ["[headrace.models]", f"{ARCHITECTURE} = speech_example.model:{ARCHITECTURE}"]
        if processor:
            lines += ["[headrace.multimodal_processors]",
                      f"{ARCHITECTURE} = speech_example.processor:BandsProcessor"]  # fmt: skip
        info = tmp_path / "speech_example-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: speech-example\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        _forget()

    yield make
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    plugins.forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "speech_example"]:
        del sys.modules[name]


def config(checkpoint: Path, **settings: Any) -> Any:
    return EngineArgs(
        model=str(checkpoint), enforce_eager=True, served_model_name=("ears",), **settings
    ).create_engine_config()


def speech() -> bytes:
    """Two seconds of a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        times = np.arange(32_000) / 16_000
        out.writeframes((np.sin(2 * np.pi * 300 * times) * 9000).astype("<i2").tobytes())
    return file.getvalue()


async def ask(engine: Any, **form: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=create_app(engine, ServerSettings()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        files = {"file": ("speech.wav", speech())}
        return await client.post(TRANSCRIBE, files=files, data=form, timeout=60)


async def test_it_serves_as_it_is(checkpoint: Path, install: Install) -> None:
    install()
    engine = connect(config(checkpoint))
    try:
        assert engine.model.tasks == ("generate", "transcription")
        assert engine.model.source == "plugin:speech-example 1.0"
        answer = await ask(engine, language="en", max_completion_tokens="5")
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"] == {"type": "duration", "seconds": 2}
        told = await ask(engine, to_language="de")
        assert told.status_code == 400
        assert "to_language = 'de': SpeechExampleForCausalLM takes none" in told.text
        told = await ask(engine, response_format="verbose_json")
        assert "has no timestamps" in told.json()["error"]["message"]
    finally:
        await engine.shutdown()


def test_inspect_says_what_it_is(checkpoint: Path, install: Install, capsys: Any) -> None:
    install()
    assert run("inspect", [str(checkpoint), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["supported_tasks"] == ["generate", "transcription"]
    assert found["class"] == f"speech_example.model:{ARCHITECTURE}"
    assert found["source"] == "plugin:speech-example 1.0"
    assert {TRANSCRIBE, "/v1/audio/translations", "/v1/completions"} <= set(found["routes"])
    assert {"transcription", "multimodal", "generation"} <= set(found["interfaces"])
    assert found["unmet"] == {}


def test_the_suite_passes(checkpoint: Path, install: Install, capsys: Any) -> None:
    install()
    assert run("plugins", ["check", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "ok     prompts bring the audio" in out
    assert "FAILS" not in out
    assert "response formats    json, text" in out


class Broken(NamedTuple):
    """A change of the class, and what is said of it."""

    changes: tuple[tuple[str, str], ...]
    diagnosis: str


NAME = ARCHITECTURE
BROKEN = {
    "not-inherited": Broken(
        ((f"{NAME}(LlamaForCausalLM, SupportsTranscription)", f"{NAME}(LlamaForCausalLM)"),),
        f"{NAME} does not inherit SupportsTranscription",
    ),
    "switched-off": Broken(
        (("    supported_languages =", "    supports_transcription = False\n    supported_languages ="),),
        f"{NAME}.supports_transcription = False: leave it out",
    ),
    "no-languages": Broken(
        (("    supported_languages =", "    languages ="),
         ("cls.supported_languages", "cls.languages")),
        f"{NAME}.supported_languages is missing",
    ),
    "no-config": Broken(
        (("def get_speech_to_text_config", "def speech_to_text_config"),),
        f"{NAME}.get_speech_to_text_config is missing: add a @classmethod "
        "get_speech_to_text_config(cls, model_config, task_type)",
    ),
    "no-prompt": Broken(
        (("def get_generation_prompt", "def generation_prompt"),),
        f"{NAME}.get_generation_prompt is missing: add a @classmethod "
        "get_generation_prompt(cls, audio, ",
    ),
    "no-classmethod": Broken(
        (("    @classmethod\n    def get_generation_prompt", "    def get_generation_prompt"),),
        f"{NAME}.get_generation_prompt is a function, no classmethod",
    ),
    "wrong-parameters": Broken(
        (("cls, audio: AudioClip, language: str | None,", "cls, waveform: AudioClip, language: str,"),
         ("(audio.samples, audio.sample_rate)", "(waveform.samples, waveform.sample_rate)")),
        f"{NAME}.get_generation_prompt has the wrong parameters: headrace does not pass waveform",
    ),
    "flag": Broken(
        (("    supported_languages =", "    supports_segment_timestamp = 'yes'\n    supported_languages ="),),
        f"{NAME}.supports_segment_timestamp = 'yes': must be True or False",
    ),
    "times": Broken(
        (("    supported_languages =", "    supports_segment_timestamp = True\n    supported_languages ="),),
        f"{NAME}.supports_segment_timestamp is True, but get_timestamp is not defined",
    ),
}  # fmt: skip


@pytest.mark.keep(4, every_value=False)
@pytest.mark.parametrize("case", BROKEN)
async def test_what_is_amiss_is_named(
    case: str, checkpoint: Path, install: Install, capsys: Any
) -> None:
    broken = BROKEN[case]
    install(*broken.changes)
    found = inspect_model(config(checkpoint))
    assert found.model.tasks == ("generate",)
    (reason,) = found.model.unmet["transcription"]
    assert reason.startswith(broken.diagnosis)
    assert f"no transcription:\n- {reason}" in str(found)
    answer = await ask(FakeEngine(model=found.model))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert run("plugins", ["check", str(checkpoint)]) != 0
    assert f"FAILS  {reason}" in capsys.readouterr().out


def test_all_diagnoses_differ() -> None:
    assert len({broken.diagnosis for broken in BROKEN.values()}) == len(BROKEN) >= 8


async def test_an_engine_without_the_member_starts_and_says_so(
    checkpoint: Path, install: Install
) -> None:
    broken = BROKEN["no-prompt"]
    install(*broken.changes)
    engine = connect(config(checkpoint))
    try:
        assert engine.speech is None
        answer = await ask(engine)
        assert answer.status_code == 400
        assert broken.diagnosis in answer.json()["error"]["message"]
    finally:
        await engine.shutdown()


def test_languages_that_are_none_keep_the_class_from_being_made(
    checkpoint: Path, install: Install
) -> None:
    install(('{"en": "English"', '{"english": "English"'))
    with pytest.raises(
        PluginLoadError, match=r"supported_languages: \['english'\] are not ISO 639"
    ):
        inspect_model(config(checkpoint))


def test_without_a_processor(checkpoint: Path, install: Install) -> None:
    install(processor=False)
    (reason,) = inspect_model(config(checkpoint)).model.unmet["transcription"]
    assert reason.startswith(f"no media processor is registered for {NAME}: add an entry")


def test_another_class_than_the_users_is_served(checkpoint: Path, install: Install) -> None:
    install()
    overrides = {"architectures": ["OurEarsForCausalLM", "LlamaForCausalLM"]}
    found = inspect_model(config(checkpoint, hf_overrides=overrides))
    (reason,) = found.model.unmet["transcription"]
    assert reason.startswith(
        "config.json names the architecture 'OurEarsForCausalLM' first, which no"
    )
    assert "so LlamaForCausalLM is served" in reason
    assert "speech-example 1.0" in reason


def test_a_plugin_that_is_not_installed(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedModel, match=NAME):
        inspect_model(config(checkpoint))


def test_the_log_at_start_has_the_block(
    checkpoint: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.assembly.inspection import start_block

    install(*BROKEN["no-config"].changes)
    found = inspect_model(config(checkpoint))
    with caplog.at_level(logging.INFO):
        block = start_block(found.model, ["/health", "/v1/completions"])
    assert "supported_tasks  generate" in block
    assert "routes           /v1/completions\n" in block
    assert f"- {NAME}.get_speech_to_text_config is missing" in block
