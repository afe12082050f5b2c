"""The metrics page, the dashboard and the real exposition say the same; examples on pages work."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from servers import serving

from headrace_testing.waiting import wait_until

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/serving" / name for name in ("operations.md", "metrics.md")]
DASHBOARD = ROOT / "examples/monitoring/grafana/dashboards/headrace.json"
KINDS = {"gauge", "counter", "histogram"}
UNUSED = {
    "pooling_requests",
    "pooling_prompt_tokens",
    "lora_requests_running",
    "lora_requests_waiting",
    "spec_decode_num_accepted_tokens_per_pos",
}
"""A server of text counts none of these without adapters and guesses, so they have no labels;
test_pooling_wire.py, test_lora_serving.py and test_speculation.py read them."""


@pytest.fixture(scope="module")
def server():
    with serving(
        "--enable-lora", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces"
    ) as running:
        body = json.dumps({"prompt": "Hello", "max_tokens": 7, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            running.api + "/completions", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()
        yield running


@pytest.fixture(scope="module")
def families(server):
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Name -> (kind, labels), from the page's table."""
    found = {}
    for line in PAGES[1].read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) >= 5 and cells[2] in KINDS:
            labels = set(re.findall(r"`(\w+)`", cells[3]))
            if not cells[3] or cells[3].startswith("+"):
                labels |= {"model_name", "engine"}
            found[cells[1].strip("`")] = (cells[2], labels)
    return found


def test_the_page_lists_what_is_served(families):
    served = {
        name.removeprefix("headrace:"): family
        for name, family in families.items()
        if name.startswith("headrace:") and not name.endswith("_created")
    }
    table = documented()
    offload = {name for name in table if name.startswith("kv_offload_")}
    assert set(table) - offload == set(served)  # test_kv_transfer.py's server has a connector
    for name, (kind, labels) in table.items():
        if name in offload:
            continue
        assert served[name].type == kind, name
        if name in UNUSED:
            continue
        shown = {label for sample in served[name].samples for label in sample.labels} - {"le"}
        assert shown == labels, name
    others = {name for name in families if not name.startswith("headrace:")}
    assert all(name.startswith("process_") for name in others)


def test_counts_are_right(server):
    before = server.metric("generation_tokens_total")
    prompts = server.metric("prompt_tokens_total")
    body = {"prompt": [65, 66, 67, 68], "max_tokens": 7, "ignore_eos": True}
    request = urllib.request.Request(
        server.api + "/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=60).read()
    wait_until(lambda: server.metric("generation_tokens_total") - before >= 7)
    assert server.metric("generation_tokens_total") - before == 7
    assert server.metric("prompt_tokens_total") - prompts == 4
    assert server.metric("engine_healthy") == 1
    assert server.metric("request_success_total") >= 2


def test_every_query_of_the_dashboard_names_a_series(families):
    series = {sample.name for family in families.values() for sample in family.samples}
    labels = {
        sample.name: set(sample.labels) for family in families.values() for sample in family.samples
    }
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    queries += [v["query"]["query"] for v in dashboard["templating"]["list"]]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"(?:headrace:|process_)\w+", query)
        assert names, query
        for name in names:
            assert name in series, f"{name} of {query!r} is no series"
            for label in re.findall(re.escape(name) + r"\{(\w+)=~", query):
                assert label in labels[name], query
            for by in re.findall(r"by \(([\w, ]+)\)", query):
                assert set(by.split(", ")) <= labels[name], query
    places = [tuple(p["gridPos"].values()) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_the_examples_fit_together():
    folder = ROOT / "examples/monitoring"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            assert (folder / volume.split(":")[0]).exists(), volume
    scrape = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["job_name"] == "headrace"
    source = yaml.safe_load(
        (folder / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )
    used = {
        t["datasource"]["uid"]
        for p in json.loads(DASHBOARD.read_text())["panels"]
        for t in p["targets"]
    }
    assert used == {source["datasources"][0]["uid"]}


def examples():
    """(page, command, lines of output that must show) of all console blocks."""
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for part in block.split("$ ")[1:]:
                command, *shown = part.strip().split("\n")
                yield pytest.param(command, shown, id=f"{page.stem}: {command[:60]}")


@pytest.mark.parametrize(("command", "shown"), list(examples()))
def test_the_pages_examples(server, command, shown):
    command = command.replace("http://localhost:8000", server.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for line in shown:
        assert line in done.stdout
