"""Faults of a start: what is said last, and the exit status (REL-11, F13).

A mistake that can be known without the model is told before torch is imported: such a command runs
with a torch that ends the process. These commands run in forks of one process that has imported
headrace; those that read the environment or may import torch start a Python of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace import demo
from headrace_core.errors import BY_CODE

IMPORTED = 99
"""Exit status of a process that imported torch too early."""
LIMIT = 60.0
"""Seconds that a command may take; it only ends a hang."""


class Fault(NamedTuple):
    """A mistake in a command line, and the last line that tells it."""

    words: str
    """The command line; ``{name}`` stands for a file or folder of :func:`world`."""
    said: tuple[str, ...]
    """Words of the last line."""
    code: str
    environ: Mapping[str, str]
    early: bool
    """It is told before torch is imported."""


def fault(
    words: str, *said: str, code: str = "HR-CFG-001", environ: Mapping[str, str] | None = None,
    early: bool = True,
) -> Fault:  # fmt: skip
    """See :class:`Fault`."""
    return Fault(words, said, code, environ or {}, early)


SERVE = "serve --device cpu --port 0"
SIM = "serve --device sim --port 0"
FAULTS: Mapping[str, Fault] = {
    # the command line
    "command": fault("srve", "'srve'", "'serve'", code="HR-CFG-002"),
    "flag": fault(f"{SERVE} --max-model-length 3", "--max-model-len", code="HR-CFG-002"),
    "value": fault("serve --port many", "--port", "'many'", code="HR-CFG-002"),
    "config file missing": fault("serve --config {none}.yaml", "none.yaml", code="HR-CFG-002"),
    "config file not a mapping": fault("serve --config {list_yaml}", "list.yaml", code="HR-CFG-002"),
    "folder of traces": fault(
        f"{SERVE} --profiler-config.profiler torch --profiler-config.torch_profiler_dir /proc/none",
        "profiler_config.torch_profiler_dir", "'/proc/none'", "cannot be written into",
    ),
    "models file missing": fault(f"{SIM} --models-config {{none}}", "none"),
    "instruction set": fault(
        SERVE, "HEADRACE_CPU_ISA='avx9000'", "this machine has", environ={"HEADRACE_CPU_ISA": "avx9000"},
        early=False,
    ),
    "partner of a key": fault("serve --ssl-keyfile {key_pem}", "ssl_certfile", "ssl_keyfile"),
    "partner of tools": fault("serve --enable-auto-tool-choice", "tool_call_parser"),
    "partner of origins": fault(
        "serve --allow-credentials", "allow_credentials", "allowed_origins"
    ),
    "names twice": fault("serve --served-model-name a a", "served_model_name", "different"),
    "log level": fault(
        SERVE, "HEADRACE_LOGGING_LEVEL", "LOUD", environ={"HEADRACE_LOGGING_LEVEL": "LOUD"}
    ),
    "log configuration": fault(f"{SERVE} --log-config-file {{text}}", "logging configuration"),
    # what the server's settings name
    "certificate missing": fault(
        f"{SERVE} --ssl-certfile {{none}} --ssl-keyfile {{key_pem}}", "ssl_certfile", "none",
        "No such file"
    ),
    "key of another certificate": fault(
        f"{SERVE} --ssl-certfile {{cert_pem}} --ssl-keyfile {{other_pem}}", "ssl_keyfile",
        "other.pem"
    ),
    "authorities": fault(
        f"{SERVE} --ssl-certfile {{cert_pem}} --ssl-keyfile {{key_pem}} --ssl-ca-certs {{text}}",
        "ssl_ca_certs", "text"
    ),
    "keys missing": fault(f"{SERVE} --api-key-file {{none}}", "api_key_file", "none"),
    "keys a folder": fault(f"{SERVE} --api-key-file {{folder}}", "api_key_file", "folder"),
    "keys empty": fault(f"{SERVE} --admin-api-key-file {{empty}}", "admin_api_key_file", "no key"),
    "key too short": fault(
        f"{SERVE} --hardened", "HEADRACE_API_KEY", "22", environ={"HEADRACE_API_KEY": "a"}
    ),
    "open to the network": fault(f"{SERVE} --hardened --host 0.0.0.0", "host", "loopback"),
    "control without a key": fault(
        f"{SERVE} --enable-control-routes", "enable_control_routes", "key"
    ),
    "scope without a key": fault(f"{SERVE} --api-key-scope v1", "api_key_scope", "key"),
    "middleware missing": fault(f"{SERVE} --middleware no.such", "middleware", "no.such"),
    "middleware not a class": fault(f"{SERVE} --middleware os.path.join", "middleware", "class"),
    "tool parser": fault(
        f"{SERVE} --enable-auto-tool-choice --tool-call-parser herms", "'herms'", "'hermes'",
        code="HR-PLG-001"
    ),
    "reasoning parser": fault(
        f"{SERVE} --reasoning-parser qwen4", "'qwen4'", "'qwen3'", code="HR-PLG-001"
    ),
    "parser's file missing": fault(
        f"{SERVE} --enable-auto-tool-choice --tool-call-parser x --tool-parser-plugin {{none}}.py",
        "none.py", code="HR-PLG-003"
    ),
    "parser's file broken": fault(
        f"{SERVE} --reasoning-parser x --reasoning-parser-plugin {{broken_py}}", "broken.py",
        "SyntaxError", code="HR-PLG-003"
    ),
    "keep-alive": fault(
        SERVE, "HEADRACE_HTTP_TIMEOUT_KEEP_ALIVE", "'long'",
        environ={"HEADRACE_HTTP_TIMEOUT_KEEP_ALIVE": "long"}
    ),
    "tool server": fault(f"{SERVE} --tool-server nowhere", "tool_server"),
    # the address
    "port taken": fault("serve --device cpu --port {port}", "port = ", "in use", code="HR-NET-002"),
    "host unknown": fault(f"{SERVE} --host nowhere.invalid", "nowhere.invalid", code="HR-NET-002"),
    "socket's path too long": fault(
        f"serve --device cpu --uds {'/x' * 60}", "uds", "too long", code="HR-NET-002"
    ),
    "socket's path a file": fault(
        "serve --device cpu --uds {text}", "uds", "text", code="HR-NET-002"
    ),
    # what the engine's settings name
    "device": fault("serve --device tpu --port 0", "'tpu'", "'cpu'"),
    "scheduler": fault(f"{SERVE} --scheduler-cls mine", "'mine'", "default", code="HR-PLG-001"),
    "quantization": fault(f"{SERVE} --quantization fp9", "'fp9'", "'fp8'", code="HR-PLG-001"),
    "attention": fault(f"{SERVE} --attention-backend pagd", "'pagd'", "'paged'", code="HR-PLG-001"),
    "load format": fault(f"{SERVE} --load-format safetensor", "'safetensors'", code="HR-PLG-001"),
    "kernels": fault(
        f"{SERVE} --kernels {{{{\"*\":\"fast\"}}}}", "'fast'", "reference", code="HR-PLG-001"
    ),
    "threads": fault(f"{SERVE} --num-threads 100000", "num_threads", "at most"),
    "executor": fault(f"{SERVE} --distributed-executor-backend x", "'x'", "uni", code="HR-PLG-001"),
    "general plug-in": fault(
        SERVE, "HEADRACE_PLUGINS", "'mine'", code="HR-PLG-001",
        environ={"HEADRACE_PLUGINS": "mine"}
    ),
    "logits processor": fault(f"{SERVE} --logits-processors no.such:Thing", "no.such"),
    # features that are not built
    "adapters": fault(
        "serve --lora-target-modules q_proj", "lora_target_modules", "LoRA", "not built",
        code="HR-CFG-002"
    ),
    "speculation": fault(
        f"{SERVE} --speculative-config.method mtp", "speculative_config.method", "'mtp'",
        "LlamaForCausalLM", "DeepseekV3ForCausalLM",
    ),
    "head": fault(
        "serve --speculative-config.method eagle", "speculative_config.model", "None", "checkpoint"
    ),
    "head missing": fault(
        f"{SERVE} --speculative-config.method eagle --speculative-config.model {{none}}",
        "speculative_config.model", "none",
    ),
    "draft model missing": fault(
        f"{SERVE} --speculative-config.model {{none}} --speculative-config.num_speculative_tokens 2",
        "speculative_config.model", "none",
    ),
    "several devices": fault(
        f"{SERVE} --pipeline-parallel-size 65", "pipeline_parallel_size", "in 1..64"
    ),
    # the checkpoint
    "model missing": fault("serve {none} --device cpu --port 0", "none"),
    "model on no hub": fault(
        "serve no-such-owner/no-such-model --device cpu --port 0", "no-such-owner/no-such-model",
        code="HR-NET-001", environ={"HF_HUB_OFFLINE": "1"}
    ),
    "folder empty": fault("serve {folder} --device cpu --port 0", "config.json", code="HR-MOD-001"),
    "config.json damaged": fault(
        "serve {damaged} --device cpu --port 0", "config.json", "JSON", code="HR-MOD-001"
    ),
    "architecture": fault(
        "serve {unknown} --device cpu --port 0", "NoSuchForCausalLM", code="HR-MOD-001"
    ),
    "tokenizer missing": fault(
        "serve {untokenized} --device cpu --port 0", "tokenizer.json", code="HR-MOD-003"
    ),
    "weights cut off": fault(
        "serve {truncated} --device cpu --port 0", "model.safetensors", "truncated",
        code="HR-MOD-002"
    ),
    "context": fault(f"{SERVE} --max-model-len 1M", "max_model_len", "1048576", "2048"),
    "sampling defaults": fault(
        f"{SERVE} --override-generation-config {{{{\"temperature\":\"hot\"}}}}", "temperature",
        "'hot'"
    ),
    "pooling of a generator": fault(
        f"{SERVE} --pooler-config {{{{\"pooling_type\":\"LAST\"}}}}", "pooler_config", "--runner"
    ),
    "memory": fault(f"{SIM} --num-gpu-blocks-override 2", "num_gpu_blocks", code="HR-MEM-001"),
    "memory, in the other process": fault(
        f"{SIM} --num-gpu-blocks-override 2 --engine-process", "num_gpu_blocks", code="HR-MEM-001",
        early=False
    ),
    # files of other commands
    "input missing": fault(
        "run-batch --device sim -i {none} -o {folder}/out", "input_file", "none", code="HR-REQ-001"
    ),
    "output's folder missing": fault(
        "run-batch --device sim -i {requests} -o {none}/out", "output_file"
    ),
    "output a folder": fault(
        "run-batch --device sim -i {requests} -o {folder}", "output_file", "folder"
    ),
    "kept answers' folder a file": fault(
        "run-batch --device sim -i {requests} -o http://127.0.0.1:9/o --output-tmp-dir {text}",
        "text", code="HR-FIL-001"
    ),
    "input's URL": fault("run-batch --device sim -i http://[::1/x -o {folder}/out", "not a URL"),
    "benchmark": fault("bench latncy", "'latncy'", "'latency'", code="HR-CFG-002"),
    "benchmark's URL": fault("bench serve --base-url nonsense", "base URL"),
    "server's URL": fault("chat -q hi --url nonsense", "url", "'nonsense'"),
    "server's key": fault("complete -q hi --url http://127.0.0.1:9/v1 --api-key 漢", "api_key"),
    "model to inspect": fault("inspect {none} --device cpu", "none"),
    "role of plug-ins": fault("plugins parsers", "'parsers'", "tool_parsers", code="HR-CFG-002"),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Files and folders by name, and a port that is taken."""
    root = tmp_path_factory.mktemp("faults")
    files = {
        "text": "nonsense\n", "empty": "# no key\n", "list.yaml": "- 1\n", "broken.py": "def (",
        "requests": json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions",
                                "body": {"prompt": "a", "max_tokens": 1}}) + "\n",
    }  # fmt: skip
    for name, text in files.items():
        (root / name).write_text(text)
    (root / "folder").mkdir()
    _make_certificate(root / "key.pem", root / "cert.pem")
    _make_certificate(root / "other.pem", root / "others-cert.pem")
    for name in ("damaged", "unknown", "untokenized", "truncated"):
        shutil.copytree(demo.path(), root / name)
    (root / "damaged/config.json").write_text("{")
    (root / "unknown/config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    (root / "untokenized/tokenizer.json").unlink()
    os.truncate(root / "truncated/model.safetensors", 100_000)
    _stand_in(root / "guard", "torch", f"import os; os._exit({IMPORTED})")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {path.name.replace(".", "_"): str(path) for path in root.iterdir()}
        yield {**names, "root": str(root), "none": str(root / "none"),
               "port": str(taken.getsockname()[1])}  # fmt: skip


def _make_certificate(key: Path, certificate: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost"],
        check=True, capture_output=True, timeout=LIMIT,
    )  # fmt: skip


def _stand_in(folder: Path, package: str, code: str) -> None:
    """A package that stands before the installed one."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(code)


class Done(NamedTuple):
    """A command that has ended."""

    status: int
    stderr: str


@pytest.fixture(scope="module")
def forked(world: dict[str, str]) -> Iterator[Callable[[list[str]], Done]]:
    """Run ``headrace WORDS`` in a fork of a process that has imported headrace, and no torch."""
    script = Path(__file__).with_name("forked_commands.py")
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environ(world["guard"]),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        tasks, answers = process.stdin, process.stdout
        errors = Path(world["root"]) / "stderr"

        def run(words: list[str]) -> Done:
            call = {"words": words, "errors": str(errors), "seconds": int(LIMIT)}
            tasks.write(json.dumps(call) + "\n")
            tasks.flush()
            status = answers.readline()
            assert status, f"the process ended with {process.wait(LIMIT)}"
            return Done(int(status), errors.read_text())

        yield run


def run_alone(words: list[str], guard: str | None, environ: Mapping[str, str]) -> Done:
    """Run ``headrace WORDS`` in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
        env={**_environ(guard), **environ},
    )  # fmt: skip
    return Done(done.returncode, done.stderr)


def _environ(guard: str | None) -> dict[str, str]:
    """The environment, with the guard's packages before the installed ones."""
    path = os.pathsep.join(filter(None, [guard, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def check(done: Done, fault: Fault) -> None:
    """The last two lines and the status are as promised, and nobody is shown a traceback."""
    assert done.status != IMPORTED, f"torch was imported before it was said:\n{done.stderr}"
    hint, last = done.stderr.strip().splitlines()[-2:]
    assert f" {fault.code}: " in last, done.stderr
    assert done.status == BY_CODE[fault.code].exit_status
    assert hint.startswith("hint: ")
    assert f"docs/errors/{fault.code}.md" in hint
    assert not [word for word in fault.said if word not in last], last
    assert "Traceback" not in done.stderr


@pytest.mark.req("F13")
@pytest.mark.req("REL-11")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_start_says_code_cause_and_hint(
    name: str, world: dict[str, str], forked: Callable[[list[str]], Done]
) -> None:
    fault = FAULTS[name]
    words = fault.words.format(**world).split()
    if fault.early and not fault.environ:
        done = forked(words)
    else:
        done = run_alone(words, world["guard"] if fault.early else None, fault.environ)
    check(done, fault)


@pytest.mark.req("F13")
@pytest.mark.req("REL-14")
def test_a_full_disk_is_not_reported_as_a_bug() -> None:
    words = "generate --device sim --prompt a --max-tokens 2 --output /dev/full"
    done = run_alone(words.split(), None, {})
    check(done, fault(words, "No space left", code="HR-FIL-002"))


@pytest.mark.req("F13")
def test_there_are_forty() -> None:
    assert len(FAULTS) >= 40
    assert {BY_CODE[fault.code].exit_status for fault in FAULTS.values()} >= {2, 3, 4, 6, 7, 8}
    with contextlib.suppress(KeyError):
        assert BY_CODE["HR-BUG-001"].exit_status == 70
