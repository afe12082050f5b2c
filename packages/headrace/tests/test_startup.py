"""What a start imports, and what it says of its time."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.assembly.templates import PYTHON, TemplateSettings, warn_of_broken

ALWAYS_FORBIDDEN = (
    "transformers", "huggingface_hub", "scipy", "pandas", "matplotlib", "PIL", "triton",
    "torch._dynamo", "torch._inductor", "ray", "zmq",
)  # fmt: skip
"""Nothing of this is needed to serve a local text model on a CPU."""
NOT_IN_SCRIPTS = (
    "jinja2", "fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "headrace.tokenizer",
)  # fmt: skip
"""Nothing of this is needed before a script's first chat, or before it asks for its tokenizer or metrics."""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_before_the_engine_imports_no_torch() -> None:
    """Flags, server, checkpoint and tokenizer are read without it, so that mistakes show at once."""
    run(
        "import sys\n"
        "from headrace.cli import serve\n"
        "args = serve.make_parser().parse_args(['--device', 'cpu'])\n"
        "import headrace_server.run, headrace_server.app\n"
        "from headrace.assembly import front_end, starting\n"
        "from headrace.engine_args import EngineArgs\n"
        "with starting() as timeline:\n"
        "    front = front_end(EngineArgs.from_cli_args(args).create_engine_config(), None, timeline)\n"
        "assert front.input_processor.tokenizer is not None\n"
        f"forbidden = {{'torch', 'numpy', *{ALWAYS_FORBIDDEN!r}}}\n"
        "assert not forbidden & set(sys.modules), forbidden & set(sys.modules)\n"
    )


@pytest.mark.req("REL-12")
def test_a_started_engine_accounts_for_its_time_and_imports_little() -> None:
    out = run(
        "import sys, time\n"
        "from headrace import LLM, SamplingParams\n"
        "from headrace_engine.startup import StartupTimeline\n"
        # Seconds of this process's work: what other processes take meanwhile is in no phase.
        "StartupTimeline.__init__.__defaults__ = tuple(\n"
        "    time.process_time if value is time.monotonic else value\n"
        "    for value in StartupTimeline.__init__.__defaults__\n"
        ")\n"
        "with LLM(max_model_len=256, device='cpu', use_tqdm_on_load=False) as llm:\n"
        "    llm.generate('Hello', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "    timeline = llm.engine.client.timeline\n"
        "    print(*timeline.seconds, sep=',')\n"
        "    print(*(f'{p.part_of}: {p.name}' for p in timeline.phases if p.part_of), sep=',')\n"
        "    print(timeline.accounted)\n"
        f"print(*({{*{ALWAYS_FORBIDDEN!r}, *{NOT_IN_SCRIPTS!r}}} & set(sys.modules)))\n"
    )
    phases, pieces, accounted, heavy = out.splitlines()[-4:]
    assert phases.split(",") == [
        "read settings", "resolve model", "import front end", "read tokenizer", "prepare input processing",
        "prepare client", "import offline engine", "import torch", "import core", "prepare workers",
        "import engine",
        "start workers", "load model", "profile memory", "allocate cache", "warm up", "scheduler",
    ]  # fmt: skip
    assert {
        "start workers: bind kernels",
        "load model: import models",
        "load model: read and pack weights",
    } <= set(pieces.split(","))
    assert float(accounted) > 0.98
    assert not heavy


@pytest.mark.parametrize(("settings", "warns"), [(TemplateSettings(), True), (PYTHON, False)])
def test_a_broken_template_is_told_at_the_start_of_a_server_and_at_a_scripts_first_chat(
    settings: TemplateSettings, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = SimpleNamespace(chat_template="{{ nothing.of.this }}", special_tokens={})
    warn_of_broken(cast(Any, tokenizer), settings)
    assert ("chat template fails" in caplog.text) == warns
