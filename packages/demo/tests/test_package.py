"""What the distribution promises besides the checkpoint."""

from __future__ import annotations

import pathlib
import tomllib

import pytest

import headrace_demo

_ROOT = pathlib.Path(__file__).parents[1]


def test_model_path_is_a_folder_of_the_package() -> None:
    path = headrace_demo.model_path()
    assert path.is_dir()
    assert path.parent == pathlib.Path(headrace_demo.__file__).parent


def test_model_path_refuses_an_installation_without_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(headrace_demo.resources, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match="unpacked installation"):
        headrace_demo.model_path()


def test_version_is_the_one_of_the_distribution() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert headrace_demo.__version__ == project["version"]
    assert project["dependencies"] == []
