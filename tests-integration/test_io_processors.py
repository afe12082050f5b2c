"""IO processors in front of a real engine: named by a flag or by the checkpoint, online and offline."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pooling_checkpoints import bert, qwen3, text

from headrace import LLM, AsyncLLM, EngineArgs, PoolingParams
from headrace.assembly.inspection import inspect_model
from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginNotFound, UnsupportedFeature
from headrace_core.pooling import io_processor

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "use_tqdm_on_load": False}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package had registered the processor by its name."""
    known = plugins.installed

    def entries(group: str) -> Any:
        if group != io_processor.GROUP:
            return known(group)
        return {"products": plugins.Plugin(group, "products", "io_products:products", "tests 1")}

    monkeypatch.setattr(plugins, "installed", entries)


def test_fifty_requests_online_and_the_same_offline(tmp_path: Path) -> None:
    bert(tmp_path)
    texts = [text(3 + i % 9, i) for i in range(50)]
    with LLM(str(tmp_path), io_processor_plugin="products", **SETTINGS) as llm:
        assert "plugin" in llm.engine.model.tasks
        offline = [llm.encode(one, pooling_task="plugin", use_tqdm=False) for one in texts]
        with pytest.raises(ValueError, match="data must be text"):
            llm.encode(7, pooling_task="plugin")
        plain = llm.embed([texts[0], texts[0] + texts[0]], use_tqdm=False)
        no_marks = {"add_special_tokens": False}
        (bare,) = llm.encode(texts[0], pooling_task="plugin", tokenization_kwargs=no_marks)
        assert len(bare.prompt_token_ids) == len(offline[0][0].prompt_token_ids) - 3 * 2
    assert all(len(outputs) == 1 for outputs in offline)
    a, b = (torch.tensor(output.outputs.embedding) for output in plain)
    assert offline[0][0].outputs[1] == pytest.approx(float(a @ b), abs=1e-5)

    async def run() -> list[Any]:
        args = EngineArgs(model=str(tmp_path), io_processor_plugin="products", **SETTINGS)
        engine = AsyncLLM.from_engine_args(args)
        try:
            short = await engine.encode(
                texts[0], None, "bare", pooling_task="plugin", tokenization_kwargs=no_marks
            )
            assert short.outputs == pytest.approx(bare.outputs)
            return await asyncio.gather(
                *(engine.encode(one, None, f"r{i}", pooling_task="plugin")
                  for i, one in enumerate(texts))
            )  # fmt: skip
        finally:
            await engine.shutdown()

    online = asyncio.run(run())
    assert [o.outputs for o in online] == [pytest.approx(o[0].outputs) for o in offline]


def test_who_names_it_and_who_may_not(tmp_path: Path) -> None:
    encoder, decoder = tmp_path / "encoder", tmp_path / "decoder"
    for folder, make in ((encoder, bert), (decoder, qwen3)):
        folder.mkdir()
        make(folder)
    wanted = pytest.raises(UnsupportedFeature, match="io_processor_plugin")
    with LLM(str(encoder), **SETTINGS) as llm, wanted:
        llm.encode("text", pooling_task="plugin")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(config | {"io_processor_plugin": "products"}))
    with LLM(str(encoder), **SETTINGS) as llm:
        params = PoolingParams(normalize=False)
        (raw,) = llm.encode("a quick fox", params, pooling_task="plugin", use_tqdm=False)
        (unit,) = llm.encode("a quick fox", pooling_task="plugin", use_tqdm=False)
        assert raw.outputs != unit.outputs
    with pytest.raises(PluginNotFound, match=r"'nobody'.*Installed: products"):
        LLM(str(encoder), io_processor_plugin="nobody", **SETTINGS)
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM.*runner generate"):
        LLM(str(decoder), runner="generate", io_processor_plugin="products", **SETTINGS)


def test_inspecting_tells_of_the_processor(tmp_path: Path) -> None:
    bert(tmp_path)
    args = EngineArgs(model=str(tmp_path), io_processor_plugin="products", **SETTINGS)
    assert "plugin" in inspect_model(args.create_engine_config()).model.tasks


def test_a_checkpoint_that_names_one_may_generate(tmp_path: Path) -> None:
    qwen3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"io_processor_plugin": "products"}))
    args = EngineArgs(model=str(tmp_path), runner="generate", **SETTINGS)
    assert "plugin" not in inspect_model(args.create_engine_config()).model.tasks
