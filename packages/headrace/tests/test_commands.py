from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.batch.journal import Journal
from headrace.batch.lines import BatchInput
from headrace.cli import main as command
from headrace.cli.terminal import piped_lines
from headrace.error_catalogue import CATALOGUE
from headrace_core.errors import BY_CODE, CapacityError, ConfigError, RequestError, WeightsError


def _run(*words: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True, text=True, timeout=120, **kwargs,
    )  # fmt: skip


@pytest.mark.req("L6")
def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom headrace.cli.main import usage\nprint(usage())\n"
        "assert not {'torch', 'transformers', 'fastapi', 'headrace_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.req("L6")
@pytest.mark.parametrize(
    "name",
    ["serve", "chat", "complete", "generate", "run-batch", "bench", "collect-env", "plugins"],
)
def test_every_command_has_help_without_torch(name):
    code = (
        "import sys\nfrom headrace.cli.main import run\n"
        f"try:\n    run({name!r}, ['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_unknown_command_is_a_usage_error():
    done = _run("srve")
    assert done.returncode == 2
    assert "'serve'" in done.stderr


def test_version():
    assert _run("--version").stdout.strip() == f"headrace {headrace.__version__}"


@pytest.mark.req("REL-11")
@pytest.mark.keep(10, every_value=False)
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("serve", "/no/such/model", "--port", "0"), 2, "/no/such/model"),
        (("serve", "--block-size", "24", "--port", "0"), 2, "24"),
        (("serve", "--tensor-parallel-size", "0", "--port", "0"), 2, "tensor_parallel_size"),
        (("generate",), 2, "--prompt"),
        (("chat", "-q", "hi", "--url", "http://127.0.0.1:9/v1"), 2, "127.0.0.1:9"),
        (("serve", "--middleware", "no.such:thing", "--port", "0"), 2, "no.such"),
        (("serve", "--no-such-flag"), 2, "HR-CFG-002"),
        (("serve", "--collect-detailed-traces", "all", "--port", "0"), 2, "otlp_traces_endpoint"),
        (("serve", "--device", "sim", "--cpu-bind", "0", "--port", "0"), 2, "device.cpu_bind"),
        (("serve", "--device", "sim", "--fair-weights", '{"a": 1}', "--port", "0"), 2, "fair"),
        (
            ("serve", "--device", "sim", "--num-gpu-blocks-override", "2", "--port", "0"),
            4,
            "HR-MEM-001",
        ),
        (("serve", "--device", "sim", "--scheduler-cls", "nope", "--port", "0"), 7, "HR-PLG-001"),
        (("serve", "--device", "sim", "--host", "192.0.2.1"), 8, "HR-NET-002"),
        (  # before the address is taken, so before anything is loaded
            ("serve", "--device", "sim", "--host", "192.0.2.1", "--tool-server", "nowhere"),
            2,
            "tool_server",
        ),
        (("serve", "no-such-owner/no-such-model", "--port", "0"), 6, "HR-NET-001"),
        (("serve", "no-such-owner/no-such-model", "--offline", "--port", "0"), 6, "offline = True"),
        (("generate", "--prompt", "x", "--device", "cuda"), 5, "HR-DEV-001"),
        (("serve", "--device", "cuda", "--port", "0"), 5, "HR-DEV-001"),
        (("chat", "-q", "hi", "--url", ""), 2, "url = ''"),
        (("complete", "-q", "hi", "--url", ""), 2, "url = ''"),
        (
            ("serve", "--override-generation-config", '{"temprature": 1}', "--port", "0"),
            2,
            "override_generation_config.temprature: unknown key; did you mean temperature?",
        ),
        (("serve", "-pp", "0", "--port", "0"), 2, "pipeline_parallel_size"),
        (
            ("serve", "-n", "2", "--port", "0"),
            2,
            "nnodes = 2: must be a divisor of the number of ranks, 1",
        ),
        (
            ("run-batch", "--offline", "-i", "http://127.0.0.1:9/in?key=secret", "-o", "out"),
            6,
            "input_file = 'http://127.0.0.1:9/in': offline = True",
        ),
    ],
)
def test_start_errors_end_with_one_line_and_a_status(words, status, said):
    done = _run(*words, env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == status, done.stderr
    assert said in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.req("REL-11")
@pytest.mark.req("F13")
@pytest.mark.parametrize(
    ("fault", "code"),
    [("engine.step.forward=kill", "HR-ENG-002"), ("loader.read=raise", "HR-BUG-001")],
)
def test_an_engine_that_dies_and_a_bug_end_with_70(fault, code):
    pytest.importorskip("headrace_demo")
    words = ("generate", "--prompt", "x", "--engine-process", "--max-model-len", "64")
    done = _run(*words, env={**os.environ, "HEADRACE_FAILPOINTS": fault})
    assert done.returncode == 70, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"headrace generate: {code}: ")


@pytest.mark.req("REL-11")
@pytest.mark.req("F13")
def test_a_bug_shows_its_traceback_then_a_hint_then_its_cause(monkeypatch, capsys):
    def fail(words):
        raise KeyError("a\nb")

    monkeypatch.setattr("headrace.cli.plugins.main", fail)
    assert command.run("plugins", []) == 70
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-2].startswith("hint: ")
    assert lines[-1].startswith("headrace plugins: HR-BUG-001: KeyError: ")


@pytest.mark.parametrize("command_name", ["chat", "complete"])
def test_text_that_is_not_utf8_is_a_usage_error(command_name):
    words = (command_name, "-q", "ab\udcff", "--url", "http://127.0.0.1:9/v1")
    done = _run(*words)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"headrace {command_name}: HR-REQ-001: --quick: character 3 is not UTF-8; must be text in UTF-8"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_lines_that_are_not_utf8(locale, monkeypatch):
    """Python hands them on as they are in the C locale, and fails in others."""
    errors = "surrogateescape" if locale == "C" else "strict"
    lines = io.TextIOWrapper(io.BytesIO(b"\n\xc3\xa9\nb\xff\nc\n"), "utf-8", errors)
    monkeypatch.setattr(sys, "stdin", lines)
    found = piped_lines()
    assert next(found) == "\u00e9"
    with pytest.raises(RequestError, match="standard input, line 3: character 2 is not UTF-8"):
        next(found)


@pytest.mark.req("F10")
@pytest.mark.parametrize("words", [("plugins",), ("complete", "-q", "Hi", "--device", "sim")])
def test_a_full_standard_output_is_named(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *words], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=120,
        )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"headrace {words[0]}: HR-FIL-002: standard output: No space left on device"
    assert done.returncode == 8


@pytest.mark.req("F10")
def test_a_full_disk_is_named_with_its_file(tmp_path, monkeypatch, capsys):
    def write(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = Journal(tmp_path / "out.jsonl.partial", BatchInput(1, "digest"), "model")
    journal.add(1, b"{}")
    with pytest.raises(OSError, match="No space left") as caught:
        journal.write_output(Path("/dev/full"))
    assert command.report_error("run-batch", caught.value) == 8
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left") as caught:
        journal.add(2, b"{}")
    assert command.report_error("run-batch", caught.value) == 8
    first, second = (line for line in capsys.readouterr().err.splitlines() if "HR-FIL-002:" in line)
    assert first == "headrace run-batch: HR-FIL-002: /dev/full: No space left on device"
    assert f"{tmp_path}/out.jsonl.partial: No space left on device" in second


def test_hints_of_commands_do_not_speak_of_answers(capsys):
    command.report_error("generate", RequestError("temperature = -1: must be at least 0"))
    assert "error.param" not in capsys.readouterr().err
    for entry in CATALOGUE:
        if BY_CODE[entry.code].exit_status is not None:
            assert not re.search(r"\berror\.[a-z]", entry.hint), entry.code


def test_statuses_by_class():
    assert command.status_of(ConfigError("x")) == 2
    assert command.status_of(WeightsError("x")) == 3
    assert command.status_of(CapacityError("x")) == 4


def test_collect_env_shows_no_secret():
    done = _run(
        "collect-env", env={**os.environ, "HEADRACE_API_KEY": "canary", "HEADRACE_X": "seen"}
    )
    assert done.returncode == 0
    assert "canary" not in done.stdout
    assert "HEADRACE_X=seen" in done.stdout
    assert "torch" in done.stdout


def test_collect_env_shows_what_is_kept_between_starts(tmp_path):
    (tmp_path / "packed-weights").mkdir()
    (tmp_path / "packed-weights" / "one.weights").write_bytes(bytes(3 << 20))
    done = _run("collect-env", env={**os.environ, "HEADRACE_CACHE_ROOT": str(tmp_path)})
    assert "packed-weights: 1 files, 3.0 MiB" in done.stdout
    done = _run("collect-env", env={**os.environ, "HEADRACE_CACHE_ROOT": ""})
    assert "nothing (HEADRACE_CACHE_ROOT is empty)" in done.stdout


def test_models_lists_architectures():
    done = _run("models", "qwen3moe")
    assert done.returncode == 0
    assert "Qwen3MoeForCausalLM" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 architectures"
    rows = json.loads(_run("models", "--task", "speech", "--json").stdout)
    assert {row["architecture"] for row in rows} >= {"WhisperForConditionalGeneration"}
    assert {row["task"] for row in rows} == {"speech"}
    assert _run("models", "no such model").returncode == 1


def test_plugins_lists_and_checks():
    done = _run("plugins", "models", "--check")
    assert done.returncode == 0, done.stdout
    assert "LlamaForCausalLM" in done.stdout
    assert "FAILS" not in done.stdout
    assert _run("plugins", "nonsense").returncode == 2


def test_public_names_resolve_lazily():
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None
    with pytest.raises(AttributeError):
        headrace.no_such_name  # noqa: B018
    code = "import sys, headrace\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_user_facing_submodules():
    from headrace.config import EngineConfig
    from headrace.inputs import TextPrompt
    from headrace.outputs import RequestOutput
    from headrace.sampling_params import RequestOutputKind

    assert all((EngineConfig, TextPrompt, RequestOutput, RequestOutputKind))


@pytest.mark.req("SEC-14")
def test_what_the_server_knows_of_structured_output_reaches_the_engine():
    from headrace.cli.serve import structured_outputs
    from headrace_server.settings import ServerSettings

    assert structured_outputs(ServerSettings(), {"backend": "guidance"}) == {"backend": "guidance"}
    reasons = structured_outputs(ServerSettings(reasoning_parser="qwen3"), {})
    assert reasons == {"reasoning_parser": "qwen3", "reasoning_parser_plugin": ""}
    hardened = structured_outputs(ServerSettings(hardened=True), {"max_depth": 40})
    assert hardened["compile_seconds"] == 2
    assert hardened["max_depth"] == 40, "its own flag wins"
