"""Faults of a start, each in a process of its own: what is said last, and the exit status (REL-11, F13).

A mistake that can be known without the model is told before torch is imported: such a command runs
with a torch that ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace import demo
from headrace_core.catalogue import BY_CODE

IMPORTED = 99
"""Exit status of a process that imported torch too early."""
LIMIT = 60.0
"""Seconds that a command may take; it only ends a hang."""


class Fault(NamedTuple):
    """What is wrong, and what must be said of it."""

    words: str
    """The command line; ``{name}`` stands for a file or folder of :func:`world`."""
    code: str
    said: tuple[str, ...]
    """Words of the last line."""
    environ: Mapping[str, str] = {}
    early: bool = True
    """Whether it is told before torch is imported."""


SERVE = "serve --device cpu --port 0"
SIM = "serve --device sim --port 0"
FAULTS: Mapping[str, Fault] = {
    # the command line
    "command": Fault("srve", "HR-CFG-002", ("'srve'", "'serve'")),
    "flag": Fault(f"{SERVE} --max-model-length 3", "HR-CFG-002", ("--max-model-len",)),
    "value": Fault("serve --port many", "HR-CFG-002", ("--port", "'many'")),
    "config file missing": Fault("serve --config {none}.yaml", "HR-CFG-002", ("none.yaml",)),
    "config file no mapping": Fault("serve --config {list_yaml}", "HR-CFG-002", ("list.yaml",)),
    "models file missing": Fault(f"{SIM} --models-config {{none}}", "HR-CFG-001", ("none",)),
    "partner of a key": Fault(
        "serve --ssl-keyfile {key_pem}", "HR-CFG-001", ("ssl_certfile", "ssl_keyfile")
    ),
    "partner of tools": Fault(
        "serve --enable-auto-tool-choice", "HR-CFG-001", ("tool_call_parser",)
    ),
    "partner of origins": Fault(
        "serve --allow-credentials", "HR-CFG-001", ("allow_credentials", "allowed_origins")
    ),
    "names twice": Fault(
        "serve --served-model-name a a", "HR-CFG-001", ("served_model_name", "different")
    ),
    "log level": Fault(
        SERVE, "HR-CFG-001", ("HEADRACE_LOGGING_LEVEL", "LOUD"), {"HEADRACE_LOGGING_LEVEL": "LOUD"}
    ),
    "log configuration": Fault(
        f"{SERVE} --log-config-file {{text}}", "HR-CFG-001", ("logging configuration",)
    ),
    # what the server's settings name
    "certificate missing": Fault(
        f"{SERVE} --ssl-certfile {{none}} --ssl-keyfile {{key_pem}}", "HR-CFG-001",
        ("ssl_certfile", "none", "No such file"),
    ),
    "key of another certificate": Fault(
        f"{SERVE} --ssl-certfile {{cert_pem}} --ssl-keyfile {{other_pem}}", "HR-CFG-001",
        ("ssl_keyfile", "other.pem"),
    ),
    "authorities": Fault(
        f"{SERVE} --ssl-certfile {{cert_pem}} --ssl-keyfile {{key_pem}} --ssl-ca-certs {{text}}",
        "HR-CFG-001", ("ssl_ca_certs", "text"),
    ),
    "keys missing": Fault(
        f"{SERVE} --api-key-file {{none}}", "HR-CFG-001", ("api_key_file", "none")
    ),
    "keys a folder": Fault(
        f"{SERVE} --api-key-file {{folder}}", "HR-CFG-001", ("api_key_file", "folder")
    ),
    "keys empty": Fault(
        f"{SERVE} --admin-api-key-file {{empty}}", "HR-CFG-001", ("admin_api_key_file", "no key")
    ),
    "key too short": Fault(
        f"{SERVE} --hardened", "HR-CFG-001", ("HEADRACE_API_KEY", "22"), {"HEADRACE_API_KEY": "a"}
    ),
    "open to the network": Fault(
        f"{SERVE} --hardened --host 0.0.0.0", "HR-CFG-001", ("host", "loopback")
    ),
    "control without a key": Fault(
        f"{SERVE} --enable-control-routes", "HR-CFG-001", ("enable_control_routes", "key")
    ),
    "scope without a key": Fault(
        f"{SERVE} --api-key-scope v1", "HR-CFG-001", ("api_key_scope", "key")
    ),
    "middleware missing": Fault(
        f"{SERVE} --middleware no.such", "HR-CFG-001", ("middleware", "no.such")
    ),
    "middleware no class": Fault(
        f"{SERVE} --middleware os.path.join", "HR-CFG-001", ("middleware", "class")
    ),
    "tool parser": Fault(
        f"{SERVE} --enable-auto-tool-choice --tool-call-parser herms", "HR-PLG-001",
        ("'herms'", "'hermes'"),
    ),
    "reasoning parser": Fault(
        f"{SERVE} --reasoning-parser qwen4", "HR-PLG-001", ("'qwen4'", "'qwen3'")
    ),
    "parser's file missing": Fault(
        f"{SERVE} --enable-auto-tool-choice --tool-call-parser x --tool-parser-plugin {{none}}.py",
        "HR-PLG-003", ("none.py",),
    ),
    "parser's file broken": Fault(
        f"{SERVE} --reasoning-parser x --reasoning-parser-plugin {{broken_py}}", "HR-PLG-003",
        ("broken.py", "SyntaxError"),
    ),
    "keep-alive": Fault(
        SERVE, "HR-CFG-001", ("HEADRACE_HTTP_TIMEOUT_KEEP_ALIVE", "'long'"),
        {"HEADRACE_HTTP_TIMEOUT_KEEP_ALIVE": "long"},
    ),
    "tool server": Fault(f"{SERVE} --tool-server nowhere", "HR-CFG-001", ("tool_server",)),
    # the address
    "port taken": Fault("serve --device cpu --port {port}", "HR-NET-002", ("port = ", "in use")),
    "host unknown": Fault(f"{SERVE} --host nowhere.invalid", "HR-NET-002", ("nowhere.invalid",)),
    "socket's path too long": Fault(
        f"serve --device cpu --uds {'/x' * 60}", "HR-NET-002", ("uds", "too long")
    ),
    "socket's path a file": Fault("serve --device cpu --uds {text}", "HR-NET-002", ("uds", "text")),
    # what the engine's settings name
    "device": Fault("serve --device tpu --port 0", "HR-CFG-001", ("'tpu'", "'cpu'")),
    "scheduler": Fault(f"{SERVE} --scheduler-cls mine", "HR-PLG-001", ("'mine'", "default")),
    "quantization": Fault(f"{SERVE} --quantization fp9", "HR-PLG-001", ("'fp9'", "'fp8'")),
    "attention": Fault(f"{SERVE} --attention-backend pagd", "HR-PLG-001", ("'pagd'", "'paged'")),
    "load format": Fault(f"{SERVE} --load-format safetensor", "HR-PLG-001", ("'safetensors'",)),
    "kernels": Fault(
        f"{SERVE} --kernels {{{{\"*\":\"fast\"}}}}", "HR-PLG-001", ("'fast'", "reference")
    ),
    "threads": Fault(f"{SERVE} --num-threads 100000", "HR-CFG-001", ("num_threads", "at most")),
    "executor": Fault(
        f"{SERVE} --distributed-executor-backend x", "HR-PLG-001", ("'x'", "uni")
    ),
    "general plug-in": Fault(
        SERVE, "HR-PLG-001", ("HEADRACE_PLUGINS", "'mine'"), {"HEADRACE_PLUGINS": "mine"}
    ),
    "logits processor": Fault(
        f"{SERVE} --logits-processors no.such:Thing", "HR-CFG-001", ("no.such",)
    ),
    # features that are not built
    "adapters": Fault("serve --enable-lora", "HR-CFG-002", ("enable_lora", "LoRA", "not built")),
    "speculation": Fault(
        "serve --speculative-config {empty}", "HR-CFG-002", ("speculative decoding", "not built")
    ),
    "several devices": Fault(
        f"{SERVE} --tensor-parallel-size 2", "HR-CFG-001", ("tensor_parallel_size", "not built")
    ),
    # the checkpoint
    "model missing": Fault("serve {none} --device cpu --port 0", "HR-CFG-001", ("none",)),
    "model on no hub": Fault(
        "serve no-such-owner/no-such-model --device cpu --port 0", "HR-NET-001",
        ("no-such-owner/no-such-model",), {"HF_HUB_OFFLINE": "1"},
    ),
    "folder empty": Fault("serve {folder} --device cpu --port 0", "HR-MOD-001", ("config.json",)),
    "config.json damaged": Fault(
        "serve {damaged} --device cpu --port 0", "HR-MOD-001", ("config.json", "JSON")
    ),
    "architecture": Fault(
        "serve {unknown} --device cpu --port 0", "HR-MOD-001", ("NoSuchForCausalLM",)
    ),
    "tokenizer missing": Fault(
        "serve {untokenized} --device cpu --port 0", "HR-MOD-003", ("tokenizer.json",)
    ),
    "weights cut off": Fault(
        "serve {truncated} --device cpu --port 0", "HR-MOD-002", ("model.safetensors", "truncated")
    ),
    "context": Fault(
        f"{SERVE} --max-model-len 1M", "HR-CFG-001", ("max_model_len", "1048576", "2048")
    ),
    "sampling defaults": Fault(
        f"{SERVE} --override-generation-config {{{{\"temperature\":\"hot\"}}}}", "HR-CFG-001",
        ("temperature", "'hot'"),
    ),
    "pooling of a generator": Fault(
        f"{SERVE} --pooler-config {{{{\"pooling_type\":\"LAST\"}}}}", "HR-CFG-001",
        ("pooler_config", "--runner"),
    ),
    "memory": Fault(f"{SIM} --num-gpu-blocks-override 2", "HR-MEM-001", ("num_gpu_blocks",)),
    "memory, in the other process": Fault(
        f"{SIM} --num-gpu-blocks-override 2 --engine-process", "HR-MEM-001", ("num_gpu_blocks",),
        early=False,
    ),
    # files of other commands
    "input missing": Fault(
        "run-batch --device sim -i {none} -o {folder}/out", "HR-REQ-001", ("input_file", "none")
    ),
    "output's folder missing": Fault(
        "run-batch --device sim -i {requests} -o {none}/out", "HR-CFG-001", ("output_file",)
    ),
    "output a folder": Fault(
        "run-batch --device sim -i {requests} -o {folder}", "HR-CFG-001", ("output_file", "folder")
    ),
    "kept answers' folder a file": Fault(
        "run-batch --device sim -i {requests} -o http://127.0.0.1:9/o --output-tmp-dir {text}",
        "HR-FIL-001", ("text",),
    ),
    "input's URL": Fault(
        "run-batch --device sim -i http://[::1/x -o {folder}/out", "HR-CFG-001", ("no URL",)
    ),
    "benchmark": Fault("bench latncy", "HR-CFG-002", ("'latncy'", "'latency'")),
    "benchmark's URL": Fault("bench serve --base-url nonsense", "HR-CFG-001", ("base URL",)),
    "server's URL": Fault("chat -q hi --url nonsense", "HR-CFG-001", ("url", "'nonsense'")),
    "server's key": Fault(
        "complete -q hi --url http://127.0.0.1:9/v1 --api-key 漢", "HR-CFG-001", ("api_key",)
    ),
    "model to inspect": Fault("inspect {none} --device cpu", "HR-CFG-001", ("none",)),
    "role of plug-ins": Fault("plugins parsers", "HR-CFG-002", ("'parsers'", "tool_parsers")),
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


def run(
    words: list[str], world: Mapping[str, str], fault: Fault
) -> subprocess.CompletedProcess[str]:
    """Run ``headrace WORDS``."""
    environ = dict(fault.environ)
    before = [world["guard"]] if fault.early else []
    path = os.pathsep.join([*before, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, **environ},
    )  # fmt: skip


def check(done: subprocess.CompletedProcess[str], fault: Fault) -> None:
    """The last two lines and the status are as promised, and nobody is shown a traceback."""
    assert done.returncode != IMPORTED, f"torch was imported before it was said:\n{done.stderr}"
    hint, last = done.stderr.strip().splitlines()[-2:]
    assert f" {fault.code}: " in last, done.stderr
    assert done.returncode == BY_CODE[fault.code].exit_status
    assert hint.startswith("hint: ")
    assert f"docs/errors/{fault.code}.md" in hint
    assert not [word for word in fault.said if word not in last], last
    assert "Traceback" not in done.stderr


@pytest.mark.req("F13")
@pytest.mark.req("REL-11")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_start_says_code_cause_and_hint(name: str, world: dict[str, str]) -> None:
    fault = FAULTS[name]
    check(run(fault.words.format(**world).split(), world, fault), fault)


@pytest.mark.req("F13")
@pytest.mark.req("REL-14")
def test_a_full_disk_is_no_bug(world: dict[str, str]) -> None:
    fault = Fault("", "HR-FIL-002", ("No space left",), early=False)
    words = "generate --device sim --prompt a --max-tokens 2 --output /dev/full"
    check(run(words.split(), world, fault), fault)


@pytest.mark.req("F13")
def test_there_are_forty() -> None:
    assert len(FAULTS) >= 40
    assert {BY_CODE[fault.code].exit_status for fault in FAULTS.values()} >= {2, 3, 4, 6, 7, 8}
    with contextlib.suppress(KeyError):
        assert BY_CODE["HR-BUG-001"].exit_status == 70
