"""Entries of several models, and their shares of one budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.serve import prepare
from headrace.multi_model.budget import Budget, check_shares
from headrace.multi_model.entries import name_of, read_entry, read_file
from headrace.multi_model.serving import serve_several
from headrace_core.errors import CapacityError, ConfigError

ENTRY = {"name": "small", "model": "/models/small"}


def test_a_file_is_yaml_or_json(tmp_path: Path) -> None:
    entries = [ENTRY, {"name": "chat", "model": "/models/chat", "max_num_seqs": 4}]
    as_json, as_yaml = tmp_path / "m.json", tmp_path / "m.yaml"
    as_json.write_text(json.dumps(entries))
    as_yaml.write_text(
        "- {name: small, model: /models/small}\n"
        "- name: chat\n  model: /models/chat\n  max_num_seqs: 4\n"
    )
    assert read_file(as_json) == read_file(as_yaml) == entries


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "must hold a list"),
        ("[]", "must hold a list"),
        ("[3]", "must be an object with name and model"),
        ('[{"model": "m"}]', "name = None"),
        ('[{"name": "a"}]', "model = None"),
        ('[{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]', "'a' is used twice"),
        ('[{"name": "a", "model": "m", "max_num_seq": 3}]', "did you mean max_num_seqs"),
        ('[{"name": "a", "model": "m", "port": 3}]', "port: no setting of an entry"),
        ('[{"name": "a", "model": "m", "config": "/x"}]', "config: no setting of an entry"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_file(path)


def test_an_entry_counts_before_the_command_line() -> None:
    words = ["--max-num-seqs", "7", "--dtype", "float32", "--gpu-memory-utilization", "0.8"]
    entry = read_entry(
        ENTRY | {
            "max-num-seqs": 3, "kv_cache_memory_bytes": "2M", "enforce_eager": True,
            "tool_call_parser": "hermes", "enable_auto_tool_choice": True,
            "served_model_name": ["tiny"],
        },
        words,
    )  # fmt: skip
    config, settings = entry.prepared.config, entry.prepared.settings
    assert config.model.served_model_name == ("small", "tiny")
    assert (config.model.model, config.model.dtype) == ("/models/small", "float32")
    assert (config.scheduler.max_num_seqs, config.cache.kv_cache_memory_bytes) == (3, 2 << 20)
    assert config.graph.enforce_eager
    assert (settings.tool_call_parser, settings.enable_auto_tool_choice) == ("hermes", True)
    assert (entry.share, entry.own_bytes) == (None, None)


def test_shares_are_those_of_the_entry_alone() -> None:
    assert read_entry(ENTRY | {"gpu_memory_utilization": 0.25}, []).share == 0.25
    assert read_entry(ENTRY | {"max_memory_bytes": "1G"}, []).own_bytes == 1 << 30
    assert read_entry(ENTRY, ["--max-memory-bytes", "1G"]).own_bytes is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": "many"}, "model 'small': .*--max-num-seqs.*'many'"),
        ({"gpu_memory_utilization": 1.5}, "model 'small': .*gpu_memory_utilization"),
        ({"num_threads": 2}, "model 'small': num_threads: all models of one process"),
        ({"enable_lora": True}, "model 'small': enable_lora = True: cannot be combined"),
        ({"served_model_name": ["--api-key=x"]}, "items may not begin with '-'"),
    ],
)
def test_settings_that_are_wrong_name_the_entry(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_entry(ENTRY | change, [])


def test_a_process_of_its_own_has_its_own_threads() -> None:
    entry = read_entry(ENTRY | {"engine_process": True, "num_threads": 1}, [])
    assert entry.config.device.num_threads == 1


def test_names_are_checked_without_reading_the_settings() -> None:
    assert name_of(ENTRY) == "small"


def test_shares_are_at_most_the_whole() -> None:
    check_shares(["a", "b", "c"], [0.5, None, 0.5])
    with pytest.raises(ConfigError, match=r"are 1\.1 of the budget \(a 0\.6, b 0\.5\)"):
        check_shares(["a", "b"], [0.6, 0.5])


def test_what_is_not_asked_for_is_divided_by_those_that_come() -> None:
    budget = Budget(1000, 0.9)
    assert budget.limit_of("a", None, others=2, kept=300) == 300
    budget.claim("a", 300, 100, is_share=False)
    assert (budget.claimed, budget.free) == (100, 900)
    assert budget.limit_of("b", 300) == 300
    budget.claim("b", 300, 50, is_share=True)
    assert budget.claimed == 400
    assert budget.limit_of("c", None) == 500
    budget.release("b")
    budget.release("never")
    assert budget.free == 900


def test_a_full_budget_refuses_with_the_numbers() -> None:
    budget = Budget(1000, 0.9)
    budget.claim("a", 600, 1, is_share=True)
    with pytest.raises(CapacityError, match=r"'b': its share is 500 .* 400 are free.*0\.4000"):
        budget.limit_of("b", 500)
    budget.claim("b", 400, 300, is_share=False)
    with pytest.raises(CapacityError, match="no memory is left of the 900 bytes"):
        budget.limit_of("c", None)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--api-server-count", "2"], "api_server_count"),
        (["/models/other"], "model"),
        (["--served-model-name", "x"], "served_model_name"),
        (["--demo", "text"], "^demo = 'text': cannot"),
    ],
)
def test_what_goes_with_one_model_only_is_refused(words: list[str], field: str) -> None:
    prepared = prepare([*words, "--models-config", "m.yaml", "--port", "0"])
    assert prepared.models_config == "m.yaml"
    with pytest.raises(ConfigError, match=field):
        serve_several(words, prepared, Path("m.yaml"))
