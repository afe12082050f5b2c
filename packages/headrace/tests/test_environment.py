"""Environment variables: which are read, which are named as unread, those of the CPU's settings."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from headrace import environment
from headrace.assembly import choose_platform, resolve_engine
from headrace.cli.main import run as run_command
from headrace.engine_args import EngineArgs
from headrace.environment import VARIABLES, unread, warn_of_unread, with_cpu_variables
from headrace_core.errors import ConfigError, NetworkError
from headrace_engine.config import EngineConfig

PACKAGES = (
    "headrace", "headrace_core", "headrace_kernels", "headrace_attention", "headrace_quant",
    "headrace_models", "headrace_multimodal", "headrace_distributed", "headrace_engine",
    "headrace_server",
)  # fmt: skip
DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_is_what_the_sources_read() -> None:
    read = {
        environment.KV_SPACE, environment.THREADS_BIND, environment.REDIRECTS,
        *environment.FETCH_TIMEOUTS.values(),
    }  # fmt: skip
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            pytest.skip(f"{package} is not installed")
        for file in Path(spec.submodule_search_locations[0]).rglob("*.py"):
            if file.name != "environment.py":
                read |= set(re.findall(r'"(HEADRACE_[A-Z_]+)"', file.read_text(encoding="utf-8")))
    assert read - environment._OF_TESTS == set(VARIABLES)


def test_every_variable_is_documented_and_every_documented_one_is_read() -> None:
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(HEADRACE_\w+)` \|", page, re.MULTILINE)
    assert set(rows) == set(VARIABLES)
    for file in DOCS.rglob("*.md"):
        if "adr" not in file.parts:
            named = set(re.findall(r"\bHEADRACE_[A-Z_]+\b", file.read_text(encoding="utf-8")))
            assert named <= set(VARIABLES) | environment._OF_TESTS, file


def test_unread_variables_are_named_with_the_nearest() -> None:
    given = {
        "HEADRACE_LOGING_LEVEL": "DEBUG", "HEADRACE_LOGGING_LEVEL": "INFO", "HEADRACE_ZZZ": "1",
        "VLLM_LOGGING_LEVEL": "x", "VLLM_PLUGINS": "x", "VLLM_USE_V1": "1", "PATH": "/",
    }  # fmt: skip
    assert list(unread(given)) == [
        ("HEADRACE_LOGING_LEVEL", "; did you mean HEADRACE_LOGGING_LEVEL?"),
        ("HEADRACE_ZZZ", ""),
        ("VLLM_PLUGINS", "; headrace's own is HEADRACE_PLUGINS"),
    ]


def test_the_warning_comes_once_with_every_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(environment, "_warned", set())
    monkeypatch.setenv("HEADRACE_CPU_KVCACHE_SPCE", "4")
    for _ in range(2):
        EngineArgs().create_engine_config()
    said = [r.getMessage() for r in caplog.records if "SPCE" in r.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("_SPCE is not read; did you mean HEADRACE_CPU_KVCACHE_SPACE?")
    caplog.clear()
    monkeypatch.setattr(environment, "_warned", set())
    level = environment.logger.level
    try:
        environment.leave_warnings_to_another()
        warn_of_unread()
    finally:
        environment.logger.setLevel(level)
    assert caplog.records == []
    assert logging.getLogger("headrace.environment").level == level


def configured(settings: dict[str, Any], **environ: str) -> EngineConfig:
    config = EngineArgs(device="cpu", **settings).create_engine_config()
    return with_cpu_variables(config, choose_platform(config.device.device), environ)


@pytest.mark.parametrize(
    ("settings", "environ", "size", "bind"),
    [
        ({}, {}, None, "none"),
        ({}, {"SPACE": "1.5", "BIND": "0"}, 3 << 29, "0"),
        ({}, {"SPACE": "0", "BIND": "nobind"}, None, "none"),
        ({}, {"BIND": "all"}, None, "none"),
        ({}, {"BIND": "auto"}, None, "auto"),
        ({"kv_cache_memory_bytes": 5, "cpu_bind": "auto"}, {"SPACE": "4", "BIND": "0"}, 5, "auto"),
        ({"num_gpu_blocks_override": 7}, {"SPACE": "4"}, None, "none"),
    ],
)
def test_cpu_variables_fill_what_no_setting_says(
    settings: dict[str, Any], environ: dict[str, str], size: int | None, bind: str
) -> None:
    names = {"SPACE": environment.KV_SPACE, "BIND": environment.THREADS_BIND}
    config = configured(settings, **{names[key]: value for key, value in environ.items()})
    assert config.cache.kv_cache_memory_bytes == size
    assert config.device.cpu_bind == bind


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({environment.KV_SPACE: "4G"}, "= '4G': must be GiB, a number of at least 0"),
        ({environment.KV_SPACE: "-1"}, "must be GiB"),
        ({environment.KV_SPACE: "inf"}, "must be GiB"),
        ({environment.KV_SPACE: "nan"}, "must be GiB"),
        ({environment.KV_SPACE: "1e9"}, "= '1e9': must be GiB, at most the "),
        (
            {environment.THREADS_BIND: "0-1|2-3"},
            "one list of all cores, which the ranks divide in order",
        ),
        ({environment.THREADS_BIND: "x"}, "must be auto, nobind, all"),
    ],
)
def test_cpu_variables_with_wrong_values(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        configured({}, **environ)
    assert caught.value.field in environ


def test_other_devices_read_no_cpu_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.KV_SPACE, "x")
    config = EngineArgs(device="sim").create_engine_config()
    assert resolve_engine(config).config.cache.kv_cache_memory_bytes is None


def test_an_engine_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.KV_SPACE, "0.5")
    monkeypatch.setenv(environment.THREADS_BIND, "auto")
    resolved = resolve_engine(EngineArgs(device="cpu").create_engine_config())
    assert resolved.config.cache.kv_cache_memory_bytes == 1 << 29
    assert resolved.config.device.cpu_bind == "auto"


def test_a_command_ends_with_the_variable_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("headrace.cli.generate.configure", lambda level: None)
    monkeypatch.setenv(environment.KV_SPACE, "much")
    assert run_command("generate", ["--prompt", "x", "--device", "cpu"]) == 2
    assert f"{environment.KV_SPACE} = 'much'" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["model", "tokenizer"])
def test_offline_nothing_is_asked_for(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("headrace_demo")
    from headrace import LLM

    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    with pytest.raises(NetworkError, match="model 'no/such': offline = True"):
        LLM(**{named: "no/such"}, offline=True, download_dir=str(tmp_path), device="cpu")
