"""The files of ``deploy/``: valid by the schemas of what reads them, and true to headrace's own flags."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import route, serve
from headrace.engine_args import EngineArgs
from headrace.unsupported_flags import unbuilt
from headrace_server.http.paths import OPEN_PATHS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = DEPLOY / "compose.yaml"
ENDING = 5
"""Seconds that a server needs at most between its last answer and its end."""


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def of_kind(*kinds: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in MANIFESTS:
        yield from ((file, one) for one in documents(file) if one["kind"] in kinds)


WORKLOADS = [
    pytest.param(f, d, id=d["metadata"]["name"]) for f, d in of_kind("Deployment", "StatefulSet")
]
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]


def parsed(argv: list[str]) -> Any:
    """A command line read by the real parser; an unknown flag ends it."""
    command, *rest = argv
    args = {"serve": serve, "route": route}[command].make_parser().parse_args(rest)
    if command == "serve":
        EngineArgs.from_cli_args(args).create_engine_config()
    return args


def test_yaml_is_clean() -> None:
    yamllint = pytest.importorskip("yamllint.linter", reason="pip install yamllint")
    from yamllint.config import YamlLintConfig

    config = YamlLintConfig(file=str(DEPLOY / ".yamllint"))
    found = [
        f"{file.relative_to(ROOT)}: {problem}"
        for file in [COMPOSE, *MANIFESTS]
        for problem in yamllint.run(file.read_text(), config)
    ]
    assert not found


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_fit_kubernetes(file: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in documents(file):
        validate.validate(document, "1.37", strict=True)


def test_compose_fits_its_specification() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema")
    words = ["--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_compose_starts_what_there_is(name: str) -> None:
    service = SERVICES[name]
    args = parsed(
        [word.replace("${MODEL:?a folder or a name on a hub}", "m") for word in service["command"]]
    )
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert float(service["stop_grace_period"].removesuffix("s")) >= args.drain_timeout + ENDING
    if service["command"][0] == "serve":
        [secret] = service["secrets"]
        assert args.api_key_file == f"/run/secrets/{secret}"
    else:
        urls = [*args.server, *args.prefill, *args.decode]
        servers = {url.split("//")[1].partition(":")[0] for url in urls}
        assert servers == set(service["depends_on"]) <= set(SERVICES)
        assert all(SERVICES[one]["profiles"] == service["profiles"] for one in servers)


def test_a_pair_shares_a_folder() -> None:
    producer, consumer = (
        parsed(["serve", *SERVICES[one]["command"][2:]]) for one in ("prefill", "decode")
    )
    roles = [args.kv_transfer_config["kv_role"] for args in (producer, consumer)]
    assert roles == ["kv_producer", "kv_consumer"]
    folders = {args.kv_transfer_config["kv_connector_extra_config"]["shared_storage_path"]
               for args in (producer, consumer)}  # fmt: skip
    [folder] = folders
    for one in ("prefill", "decode"):
        assert f"kv:{folder}" in SERVICES[one]["volumes"]
    assert (
        folder in (ROOT / "Dockerfile").read_text()
    )  # made there, so that its owner is the server


@pytest.mark.parametrize(("file", "workload"), WORKLOADS)
def test_workloads(file: Path, workload: dict[str, Any]) -> None:
    spec = workload["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    args = parsed(container["args"])
    [port] = container["ports"]
    assert (args.host, args.port) == ("0.0.0.0", port["containerPort"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        how = container[probe]
        assert how.get("httpGet", {}).get("path", "/livez") in OPEN_PATHS
        assert (how.get("httpGet") or how["tcpSocket"])["port"] == port["name"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + args.drain_timeout + ENDING
    annotations = spec["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(args.port)
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    check_selected(file, labels)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    assert container["securityContext"]["readOnlyRootFilesystem"]
    if container["args"][0] == "serve":
        limit = container["resources"]["limits"]
        assert limit == container["resources"]["requests"]
        assert args.max_memory_bytes < int(limit["memory"].removesuffix("Gi")) << 30
        assert args.api_key_file.startswith(mounts["keys"] + "/")
        assert container["args"][1].startswith(mounts["models"] + "/")
        assert mounts["shm"] == "/dev/shm"


def check_selected(file: Path, labels: dict[str, str]) -> None:
    """A service, a disruption budget and a policy are there for the pods."""
    selectors = {
        "Service": lambda spec: spec["selector"],
        "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
        "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
    }
    for kind, selector in selectors.items():
        found = [one for one in documents(file) if one["kind"] == kind]
        assert any(selector(one["spec"]) == labels for one in found), kind


def test_the_router_knows_every_server() -> None:
    file = DEPLOY / "kubernetes" / "routed.yaml"
    by_kind = {one["kind"]: one for one in documents(file)}
    servers = by_kind["StatefulSet"]
    [headless] = [one for _, one in of_kind("Service") if one["spec"].get("clusterIP") == "None"]
    service = headless["metadata"]["name"]
    assert servers["spec"]["serviceName"] == service
    [port] = headless["spec"]["ports"]
    name, count = servers["metadata"]["name"], servers["spec"]["replicas"]
    [container] = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    router = parsed(container["args"])
    assert list(router.server) == [
        f"http://{name}-{i}.{service}:{port['port']}" for i in range(count)
    ]
    [served] = servers["spec"]["template"]["spec"]["containers"]
    assert router.drain_timeout > parsed(served["args"]).drain_timeout


def test_no_flag_is_one_that_is_not_built() -> None:
    words = [word for service in SERVICES.values() for word in service["command"]]
    words += [word for _, one in of_kind("Deployment", "StatefulSet")
              for word in one["spec"]["template"]["spec"]["containers"][0]["args"]]  # fmt: skip
    assert [word for word in words if word.startswith("--") and unbuilt(word)] == []
