"""A model of a foreign package, registered by its function: every process finds it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import save_model

from headrace import LLM, ModelRegistry, SamplingParams
from headrace.assembly.inspection import inspect_model
from headrace.engine_args import EngineArgs
from headrace_core import plugins
from headrace_core.errors import PluginConflict, PluginError, PluginLoadError, UnsupportedModel

EXAMPLE = Path(__file__).parents[1] / "examples" / "model_plugin"
NAME = "LanternForCausalLM"
MULTIPLIER = 3.5

Install = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lantern")
    save_model("llama", folder)
    write_config(folder, architectures=[NAME], embedding_multiplier=MULTIPLIER)
    return folder


def write_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install()``: the example; ``install(name, source)``: a package of one module, whose function
    ``register`` is its plug-in. As pip leaves them, in a folder of the path."""

    def make(name: str = "lantern", source: str = "") -> Path:
        folder = tmp_path / f"site-{name}"
        package = folder / name
        package.mkdir(parents=True)
        files = {f.name: f.read_text() for f in (EXAMPLE / "src" / "lantern").glob("*.py")}
        for file, text in ({"__init__.py": source} if source else files).items():
            (package / file).write_text(text)
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[headrace.general_plugins]\n{name} = {name}:register\n"
        )
        monkeypatch.syspath_prepend(folder)
        paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        forget(name)
        return folder

    yield make
    monkeypatch.undo()
    forget("lantern", "other", "broken")


def forget(*packages: str) -> None:
    plugins.forget()
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


REGISTER = """
from headrace import ModelRegistry
def register():
    ModelRegistry.register_model({name!r}, {target!r})
"""


def inspected(folder: Path, **settings: Any) -> Any:
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **settings)
    return inspect_model(args.create_engine_config(), memory=True)


def test_it_runs_and_its_number_matters(checkpoint: Path, install: Install) -> None:
    install()
    found = inspected(checkpoint)
    assert found.model.source == "plugin:lantern 1.0"
    assert found.model.class_path == f"lantern.model:{NAME}"
    assert found.memory.fits
    assert answer(checkpoint) != answer(checkpoint, hf_overrides={"embedding_multiplier": 1.0})


def answer(folder: Path, **settings: Any) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    with LLM(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **settings) as llm:
        (output,) = llm.generate({"prompt_token_ids": list(range(3, 20))}, params, use_tqdm=False)
        return list(output.outputs[0].token_ids)


def test_an_engine_process_runs_the_function_too(checkpoint: Path, install: Install) -> None:
    install()
    assert answer(checkpoint, engine_process=True) == answer(checkpoint)


def test_its_own_suite(install: Install) -> None:
    install()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest",
         "-c", os.devnull, "--rootdir", str(EXAMPLE), str(EXAMPLE / "tests")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_the_package_it_is_said_what_was_loaded(
    checkpoint: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugins.CHOICE, "")
    forget()
    with pytest.raises(UnsupportedModel, match=r"General plug-ins that were run: none"):
        inspected(checkpoint)
    monkeypatch.setenv(plugins.CHOICE, "other")
    install("other", REGISTER.format(name="OtherForCausalLM", target="other.model:Other"))
    with pytest.raises(UnsupportedModel, match=r"were run: other \(other 1\.0\)"):
        inspected(checkpoint)


def test_the_class_is_not_imported_before_it_is_needed(
    tmp_path: Path, checkpoint: Path, install: Install
) -> None:
    install()
    plain = tmp_path / "llama"
    save_model("llama", plain)
    inspected(plain)
    assert "lantern" in sys.modules
    assert "lantern.model" not in sys.modules


def test_a_built_in_name_is_taken_over_with_a_warning(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    source = REGISTER.format(name="LlamaForCausalLM", target=f"lantern.model:{NAME}")
    install("other", source)
    plain = tmp_path / "llama"
    save_model("llama", plain)
    write_config(plain, embedding_multiplier=MULTIPLIER)
    with caplog.at_level(logging.WARNING):
        found = inspected(plain)
    assert found.model.source == "plugin:other 1.0"
    assert "'LlamaForCausalLM' of other 1.0" in caplog.text
    assert "replaces that of headrace-models" in caplog.text


def test_two_packages_that_register_one_name_are_both_named(
    checkpoint: Path, install: Install
) -> None:
    install()
    install("other", REGISTER.format(name=NAME, target="other.model:Other"))
    with pytest.raises(PluginConflict, match=r"lantern 1\.0 .* other 1\.0"):
        inspected(checkpoint)


def test_a_function_that_raises_is_named(checkpoint: Path, install: Install) -> None:
    install("broken", "def register():\n    raise OSError('no such lamp')\n")
    with pytest.raises(PluginLoadError, match=r"'broken' .*OSError: no such lamp"):
        inspected(checkpoint)


def test_plugins_can_be_left_out(
    checkpoint: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    install("broken", "def register():\n    raise OSError\n")
    monkeypatch.setenv("HEADRACE_PLUGINS", "lantern")
    assert inspected(checkpoint).model.source == "plugin:lantern 1.0"


def test_another_constructor_is_refused(checkpoint: Path, install: Install) -> None:
    class Foreign:
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None: ...

    with pytest.raises(PluginError, match=r'must take \(context, prefix=""\)'):
        ModelRegistry.register_model(NAME, Foreign)
    source = REGISTER.format(name=NAME, target="other:Foreign")
    install("other", source + "class Foreign:\n    def __init__(self, config): ...\n")
    assert "takes (config): its constructor must take" in inspected(checkpoint).memory.reason


def test_a_script_registers_a_class_of_its_own(checkpoint: Path, install: Install) -> None:
    """As in a notebook: again and again, and for engines of this process."""
    install()
    expected = answer(checkpoint)
    forget("lantern")
    from headrace_models.families.decoder.llama import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        def token_vectors(self, ids: Any) -> Any:
            return self.embed(ids) * MULTIPLIER

    ModelRegistry.register_model("MineForCausalLM", Mine)
    ModelRegistry.register_model("MineForCausalLM", Mine)
    assert answer(checkpoint, hf_overrides={"architectures": ["MineForCausalLM"]}) == expected


def test_tensors_that_do_not_fit_are_listed_in_one_error(tmp_path: Path, install: Install) -> None:
    from safetensors.torch import load_file, save_file

    from headrace_core.errors import WeightsError

    folder = tmp_path / "wrong"
    save_model("llama", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.glow.weight"] = tensors.pop("model.norm.weight")
    tensors["model.wick.weight"] = tensors.pop("model.layers.3.mlp.down_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError) as caught:
        answer(folder)
    for name in ("model.glow.weight", "model.wick.weight", "model.norm.weight",
                 "model.layers.3.mlp.down_proj.weight"):  # fmt: skip
        assert name in str(caught.value)
