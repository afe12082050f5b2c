"""What ``headrace inspect`` says of a model's memory, by figures computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import save_model
from pooling_checkpoints import bert

from headrace.cli.main import run
from headrace_engine.execution.memory import readable

F32 = 4
TABLE = 256 * 16 * F32  # rotary: 16 cosines and sines for each of 256 positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inspected")


def memory(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What the command says; the text's last line must agree."""
    words = ("--skip-tokenizer-init", "--block-size", "16", *words)
    capsys.readouterr()
    assert run("inspect", [str(path), "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["memory"]
    assert run("inspect", [str(path), *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    if "unknown" in found:
        assert last == f"memory: unknown: {found['unknown']}"
    else:
        assert last.startswith(f"  fits here       {'yes' if found['fits'] else 'no'}: ")
    return found


def test_full_attention(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "llama"
    save_model("llama", path)
    found = memory(path, capsys)
    layer = 2 * 64 + (64 + 32 + 32 + 64) * 64 + 3 * 112 * 64
    weights = F32 * (4 * layer + 2 * 320 * 64 + 64)
    assert found["weights"] == weights + TABLE
    assert found["stored"] == weights
    assert found["dtype"] == "float32"
    # keys and values of 2 heads of 16 numbers, in 4 layers
    token = 2 * 2 * 16 * F32 * 4
    assert found["cache"] == [
        {"kind": "full attention", "layers": 4, "bytes_per_1000_tokens": 1000 * token,
         "bytes_per_request": 0, "kept_tokens": None},
    ]  # fmt: skip
    linear = F32 * (4 * layer - 4 * 2 * 64 + 320 * 64)  # without norms; the head is a linear layer
    [stored] = found["linear"]
    assert (stored["bits"], stored["layers"], stored["num_bytes"]) == (32, 4 * 7 + 1, linear)
    assert found["token_bytes"] == linear
    assert found["read_speed"] > 1e8
    estimate = 0.7 * found["read_speed"] / linear
    assert found["tokens_per_second"] == pytest.approx(estimate, abs=0.1)
    assert found["fits"]
    assert found["longest"] == found["max_model_len"] == 256
    assert run("inspect", [str(path), "--skip-tokenizer-init", "--quantization", "int4_g32"]) == 0
    text = capsys.readouterr().out
    assert "24 of 4.5 bits a weight" in text
    assert "tokens a second for one request" in text
    halved = memory(path, capsys, "--dtype", "bfloat16")
    assert halved["weights"] == weights // 2 + TABLE
    assert halved["cache"][0]["bytes_per_1000_tokens"] == 500 * token
    # 17 blocks, one of them null, are 12 more than these
    short = memory(path, capsys, "--kv-cache-memory-bytes", str(5 * 16 * token))
    assert not short["fits"]
    assert short["longest"] == 4 * 16
    assert short["spare"] == -12 * 16 * token
    assert f"{readable(12 * 16 * token)} more than there are" in short["why_not"]
    assert memory(path, capsys, "--kv-cache-memory-bytes", str(18 * 16 * token))["spare"] == (
        16 * token
    )
    large = memory(path, capsys, "--kv-cache-memory-bytes", "900T")
    assert not large["fits"]
    assert "--kv-cache-memory-bytes = " in large["why_not"]
    small = memory(path, capsys, "--max-memory-bytes", str(weights // 2))
    assert not small["fits"]
    assert small["longest"] == 0


def test_one_rank_of_several(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "ranked"
    save_model("llama", path)
    layer = (64 + 32 + 32 + 64) * 64 + 3 * 112 * 64
    own_rows = 320 * (8 + F32)  # for each token its row on this rank, and whether it has one
    rank = F32 * (4 * (layer // 2 + 2 * 64) + 2 * 160 * 64 + 64) + TABLE + own_rows
    token = 2 * 2 * 16 * F32 * 4
    limit = 1 << 30
    found = memory(path, capsys, "-tp", "2", "-dp", "2", "--max-memory-bytes", str(limit))
    assert (found["ranks"], found["engines"], found["weights"]) == (2, 2, rank)
    assert found["cache"][0]["bytes_per_1000_tokens"] == 500 * token
    blocks = 17 * 16 * token // 2  # 256 tokens, and the null block
    assert found["spare"] == limit // 4 - rank - found["activations"] - blocks
    run("inspect", [str(path), "--skip-tokenizer-init", "-tp", "2"])
    assert "memory of one rank (2 ranks):" in capsys.readouterr().out
    assert (
        "cannot be divided over tensor_parallel_size = 3"
        in memory(path, capsys, "-tp", "3")["unknown"]
    )
    assert run("inspect", [str(path), "-dp", "2", "--skip-tokenizer-init",
                           "--kv-transfer-config.kv_connector", "MemoryConnector"]) == 2  # fmt: skip


def test_a_folder_without_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "bare"
    save_model("llama", path)
    (path / "model.safetensors").unlink()
    found = memory(path, capsys)
    assert found["stored"] == 0
    assert found["fits"]
    run("inspect", [str(path), "--skip-tokenizer-init"])
    assert "in float32; no weight files are there\n" in capsys.readouterr().out


def test_rounded_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "rounded"
    save_model("llama", path)
    found = memory(path, capsys, "--quantization", "int8")
    outputs = 4 * (64 + 32 + 32 + 64 + 2 * 112 + 64) + 320
    integers = 4 * ((64 + 32 + 32 + 64) * 64 + 3 * 112 * 64) + 320 * 64
    plain = F32 * (4 * 2 * 64 + 320 * 64 + 64)
    assert found["weights"] == integers + F32 * outputs + plain + TABLE


def test_windows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "gemma3"
    save_model("gemma3", path)
    token = 2 * 2 * 16 * F32
    assert memory(path, capsys)["cache"] == [
        {"kind": "attention in a window", "layers": 5, "bytes_per_1000_tokens": 5000 * token,
         "bytes_per_request": 0, "kept_tokens": 24},
        {"kind": "full attention", "layers": 1, "bytes_per_1000_tokens": 1000 * token,
         "bytes_per_request": 0, "kept_tokens": None},
    ]  # fmt: skip


def test_recurrence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "bamba"
    save_model("bamba", path)
    # 3 inputs of a convolution over 8 x 16 + 2 x 2 x 12 channels, and 8 matrices of 16 x 12
    state = F32 * (3 * (8 * 16 + 2 * 2 * 12) + 8 * 16 * 12)
    full, recurrent = memory(path, capsys)["cache"]
    assert full["layers"] == 2
    assert recurrent == {
        "kind": "recurrence", "layers": 3, "bytes_per_1000_tokens": 0,
        "bytes_per_request": 3 * state, "kept_tokens": None,
    }  # fmt: skip


def test_an_encoder_caches_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "bert"
    path.mkdir()
    bert(path)
    found = memory(path, capsys, "--max-memory-bytes", "100000000")
    assert found["cache"] == []
    assert found["activations"] == 0
    assert found["fits"]
    assert found["spare"] == 100_000_000 - found["weights"]
    little = memory(path, capsys, "--max-memory-bytes", str(found["weights"] - 1))
    assert not little["fits"]
    assert little["longest"] == 0
    assert little["spare"] == -1


def test_a_model_that_transformers_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "other"
    save_model("llama", path)
    own, other = memory(path, capsys), memory(path, capsys, "--model-impl", "transformers")
    assert other["cache"] == own["cache"]
    assert abs(other["weights"] - own["weights"]) <= TABLE  # it makes its tables otherwise


def test_what_cannot_be_built_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "broken"
    save_model("llama", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "hidden_act": "sine"}))
    assert "hidden_act = 'sine'" in memory(path, capsys)["unknown"]


def test_a_simulated_device_holds_no_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "simulated"
    save_model("llama", path)
    assert memory(path, capsys, "--device", "sim")["unknown"] == (
        "SimPlatform makes its own worker, which builds no model"
    )
