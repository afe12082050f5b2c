"""Every family in every layout: the tokens of one process, and one layout's bits however requests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import CELLS, KINDS, LAYOUTS, PAGE, REFUSED, Family, Layout, Said, page, said
from modes import SETTINGS
from together import together

from headrace import LLM
from headrace_core.errors import ConfigError
from headrace_testing.sampling import todays

TRIES = 5
"""Batches in which engines of other processes, which nothing holds back, must have preempted a request."""


class Checkpoints:
    """A checkpoint of each family, and what one process says of it; each made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said: dict[str, Said] = {}

    def folder(self, family: str) -> Path:
        folder = self._folder / family.replace(" ", "-")
        if not folder.exists():
            folder.mkdir()
            KINDS[family].save(folder)
        return folder

    def said(self, family: str) -> Said:
        if family not in self._said:
            kind = KINDS[family]
            with LLM(str(self.folder(family)), **kind.engine()) as llm:
                self._said[family] = said(kind.ask(llm, kind.requests))
        return self._said[family]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("layouts"))


def agree(left: Said, right: Said, tolerance: float) -> None:
    assert [[t for t, _ in one] for one in left] == [[t for t, _ in one] for one in right]
    for one, other in zip(left, right, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=tolerance, rel=0)


def preempted(llm: LLM, family: Family, layout: Layout) -> list[Said]:
    """What was said in batches whose requests have too few blocks together; one was preempted."""
    requests, before = family.requests, llm.engine.stats().num_preemptions
    if layout.num_engines == 1:
        with together(llm, len(requests)):
            batches = [said(family.ask(llm, requests))]
    else:
        batches = []
        while llm.engine.stats().num_preemptions == before and len(batches) < TRIES:
            batches.append(said(family.ask(llm, requests)))
    stats = llm.engine.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_blocks
    return batches


@pytest.mark.parametrize(("name", "flags"), todays(CELLS, days=56))
def test_a_layout_says_what_one_process_says(
    name: str, flags: str, checkpoints: Checkpoints
) -> None:
    """First with few blocks and prompts in parts, one request after the other and together; then in another
    start with room for all, whose prompts are whole and begin with what is cached."""
    family, layout = KINDS[name], LAYOUTS[flags]
    folder, expected = str(checkpoints.folder(name)), checkpoints.said(name)
    few = {"num_gpu_blocks_override": family.few_blocks, "max_num_batched_tokens": 32}
    with LLM(folder, **family.engine(**layout.settings, **few, max_num_seqs=8)) as llm:
        alone = [said(family.ask(llm, [request]))[0] for request in family.requests]
        for batch in preempted(llm, family, layout):
            assert batch == alone
    agree(alone, expected, 0 if layout.same_bits else 1e-4)
    with LLM(folder, **family.engine(**layout.settings)) as llm:
        assert len(llm.collective_rpc("report")) == layout.num_processes
        for _ in range(2):
            outputs = family.ask(llm, family.requests)
            assert said(outputs) == alone
        assert max(output.num_cached_tokens for output in outputs) >= SETTINGS["block_size"]
        assert llm.engine.stats().num_preemptions == 0


@pytest.mark.parametrize(("name", "flags"), todays(REFUSED, days=4))
def test_a_refused_cell_is_refused_by_name(name: str, flags: str, checkpoints: Checkpoints) -> None:
    _, named = REFUSED[name, flags]
    settings = KINDS[name].engine(**LAYOUTS[flags].settings)
    with pytest.raises(ConfigError, match=named):
        LLM(str(checkpoints.folder(name)), **settings)


def test_the_page_has_this_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python tests-integration/layouts.py"
