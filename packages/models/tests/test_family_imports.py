"""Families stand alone: each is read with ``layers/`` beside it, without another family."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import torch

import headrace_models.families
from headrace_models.catalogue import ARCHITECTURES
from headrace_models.layers.base import Layer
from headrace_models.layers.decoder import Decoder
from headrace_models.layers.encoder import PostNormEncoder

PACKAGE = "headrace_models.families."
ROOT = Path(headrace_models.families.__path__[0])
MAX_DEPTH = 3
BASES = (Layer, Decoder, PostNormEncoder, torch.nn.Module)
"""Inheritance is counted below these."""

PARTS = {
    "decoder.gemma3n_altup",
    "decoder.gemma4_experts",
    "moe.jetmoe_attention",
    "recurrent.zamba_mamba",
    "recurrent.zamba_transformer",
    "recurrent.zaya_attention",
    "speech.whisper_alignment",
    "speech.whisper_rules",
    "speech.whisper_tokens",
}
"""Modules that are a part of a family, not a family: ``F_part`` is a part of ``F`` beside it, and only ``F``
and its other parts import it."""


def family_of(module: str) -> str:
    """The family that a module is or is a part of: ``decoder.gemma3n_altup`` -> ``decoder.gemma3n``."""
    return module.rpartition("_")[0] if module in PARTS else module


def imported_families() -> dict[str, set[str]]:
    """Family -> other families that its files import, wherever in them; empty ones are left out."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        own = _name(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{own}: a relative import hides which family it means"
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names = whole if node.module in _folders() else [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            others = {n.removeprefix(PACKAGE) for n in names if n.startswith(PACKAGE)}
            others = {other for other in others if family_of(other) != family_of(own)}
            if others:
                found.setdefault(family_of(own), set()).update(others)
    return found


def depth(cls: type) -> int:
    """The longest chain of classes from ``cls`` up to, not including, one of :data:`BASES`; classes of
    other packages (interfaces of core) count nothing."""
    if cls in BASES or not cls.__module__.startswith("headrace_models."):
        return 0
    return 1 + max(depth(base) for base in cls.__bases__)


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _folders() -> set[str]:
    folders = {PACKAGE + path.name for path in ROOT.iterdir() if path.is_dir()}
    return {PACKAGE.removesuffix("."), *folders}


def test_families_import_no_other_family() -> None:
    assert imported_families() == {}


def test_a_part_stands_beside_its_family() -> None:
    modules = {_name(path) for path in ROOT.rglob("*.py")}
    families = {row.entry.partition(":")[0].removeprefix(PACKAGE) for row in ARCHITECTURES.values()}
    for part in PARTS:
        assert part in modules, f"{part}: there is no such module"
        assert family_of(part) in modules, f"{part}: there is no family {family_of(part)} beside it"
        assert part not in families, f"{part}: models of its own make it a family"


def test_inheritance_is_at_most_three_deep() -> None:
    classes = set()
    for row in ARCHITECTURES.values():
        module, _, name = row.entry.partition(":")
        classes.add(getattr(importlib.import_module(module), name))
    found = {f"{c.__module__.removeprefix(PACKAGE)}:{c.__name__}": depth(c) for c in classes}
    assert {name: deep for name, deep in found.items() if deep > MAX_DEPTH} == {}
