"""What a start measured, found by the next one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import LLM
from headrace.assembly.start_costs import CACHE_ROOT, cache_root

SMALL = {"max_model_len": 128, "num_gpu_blocks_override": 32, "max_num_seqs": 4}


def activations(**settings: object) -> int:
    """Bytes that an engine of the demo model reckons with."""
    with LLM(**{**SMALL, **settings}) as llm:
        [report] = llm.collective_rpc("report")
        return int(report["activations_bytes"])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_ROOT, str(tmp_path))
    return tmp_path


def test_the_next_start_takes_what_the_file_says(root: Path) -> None:
    measured = activations()
    [file] = (root / "start-costs").iterdir()
    cost = json.loads(file.read_text())
    assert 0 < cost["activations"] <= measured
    file.write_text(json.dumps(cost | {"activations": 1 << 30}))
    assert activations() >= 1 << 30
    file.write_text("{}")
    assert activations() < 1 << 29  # measured again, and written again
    assert json.loads(file.read_text())["seconds"] > 0


def test_another_setting_is_measured_by_itself(root: Path) -> None:
    activations()
    activations(max_num_seqs=3)
    assert len(list((root / "start-costs").iterdir())) == 2
    activations(keep_start_costs=False, max_num_seqs=2)
    assert len(list((root / "start-costs").iterdir())) == 2


def test_the_folder() -> None:
    assert cache_root({CACHE_ROOT: ""}) is None
    assert cache_root({CACHE_ROOT: "/a"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/headrace")
    assert cache_root({}) == Path.home() / ".cache" / "headrace"
