"""The suites of proposers and of heads over all that there are: with real models, in real workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from draft_heads import SIZE, VOCAB, eagle, eagle3, medusa, mlp_speculator
from families import save_model
from modes import SETTINGS
from mtp_heads import MTP_FAMILIES, mtp

from headrace import LLM
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.platform import CpuPlatform
from headrace_core.speculation import DraftProposer, DraftTask
from headrace_core.step import ScheduledStep
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_models.speculators.found import find_head
from headrace_models.speculators.load import load_head
from headrace_testing.engine.draft_proposers import DraftProposerConformance
from headrace_testing.fakes.requests import new_request
from headrace_testing.model.decoders import build_context
from headrace_testing.model.draft_heads import DraftHeadConformance

APART: dict[str, Callable[[Path], Any]] = {
    "eagle": eagle, "eagle3": eagle3, "mlp_speculator": mlp_speculator, "medusa": medusa,
}  # fmt: skip
"""Method -> what makes its checkpoint."""
Made = tuple[Path, dict[str, Any]]
"""A model's folder, and who guesses for it."""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The checkpoints of a method, or of the MTP layers of a family."""
    known: dict[str, Made] = {}

    def llama() -> Path:
        if "llama" not in known:
            folder = tmp_path_factory.mktemp("llama-")
            save_model("llama", folder)
            known["llama"] = folder, {}
        return known["llama"][0]

    def make(kind: str) -> Made:
        if kind in MTP_FAMILIES:
            folder = tmp_path_factory.mktemp(f"{kind}-")
            mtp(kind, folder)
            return folder, {"method": "mtp"}
        if kind in APART:
            folder = tmp_path_factory.mktemp(kind)
            APART[kind](folder)
            return llama(), {"method": kind, "model": str(folder)}
        if kind == "draft_model":
            folder = tmp_path_factory.mktemp("draft-")
            save_model("qwen2", folder)
            return llama(), {"method": kind, "model": str(folder)}
        return llama(), {"method": kind, **({"prompt_lookup_max": 3} if kind == "ngram" else {})}

    def once(kind: str) -> Made:
        if kind not in known:
            known[kind] = make(kind)
        return known[kind]

    return once


class InWorker(DraftProposer):
    """What guesses in the worker of an engine. A request that it is asked for is computed first but for its
    last token, as the engine does; it has gone when the guesses are there.

    Args:
        llm: serves nobody else.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        (found,) = self._llm.collective_rpc(_guesses, args=(list(tasks),))
        return found

    def finish(self, request_id: str, token_ids: Any, num_prompt_tokens: int) -> None:
        def tell(worker: Any) -> None:
            runner = worker.model_runner
            runner.drafter._proposer.finish(request_id, token_ids, num_prompt_tokens)

        self._llm.collective_rpc(tell)


def _guesses(worker: Any, tasks: Sequence[DraftTask]) -> list[list[int]]:
    runner = worker.model_runner
    table, blocks = runner.requests, itertools.count(1)
    names, steps = [task.request_id for task in tasks], itertools.count(1)
    try:
        for task in tasks:
            ids = task.token_ids.tolist()
            count = -(-len(ids) // runner.block_size) + 5  # guesses need room, too
            own = [[next(blocks) for _ in range(count)] for _ in runner.backends]
            new = new_request(task.request_id, ids[:-1] or ids, tuple(own))
            if len(ids) == 1:
                table.add(new)
                continue
            worker.execute(ScheduledStep(next(steps), {task.request_id: len(ids) - 1}, [new]))
            row = table.row_of[task.request_id]
            table.token_ids[row, len(ids) - 1] = ids[-1]  # in place of the model's choice
        return [list(guess) for guess in runner.drafter._proposer.propose(tasks)]
    finally:
        worker.execute(ScheduledStep(next(steps), {}, gone_request_ids=names))


KINDS = ["ngram", "suffix", "draft_model", *APART, *MTP_FAMILIES]


@pytest.fixture(scope="module", params=KINDS)
def worker_of(request: Any, made: Callable[[str], Made]) -> Any:
    folder, speculative = made(request.param)
    settings = {**SETTINGS, "max_model_len": 256, "enable_prefix_caching": False}
    whole = {**speculative, "num_speculative_tokens": 32, "adaptive": False}
    with LLM(str(folder), speculative_config=whole, **settings) as llm:
        yield request.param, llm


class TestProposers(DraftProposerConformance):
    vocab_size = VOCAB

    @pytest.fixture(autouse=True)
    def _in_worker(self, worker_of: Any) -> None:
        self.kind, self.llm = worker_of

    def make(self) -> DraftProposer:
        """Suffixes remember earlier outputs: another one then."""
        if self.kind == "suffix":

            def forget(worker: Any) -> None:
                proposer = worker._settings.drafts.config.make_proposer()
                worker.model_runner.drafter._proposer = proposer

            self.llm.collective_rpc(forget)
        return InWorker(self.llm)

    def sequences(self) -> list[list[int]]:
        return [ids[:200] for ids in super().sequences()]

    def test_it_guesses(self) -> None:
        """The suite is not passed by who says nothing."""
        repeating = [1, 2, 3, 4] * 12
        task = DraftTask("a", _view(repeating), 1, 4)
        (guess,) = self.make().propose([task])
        assert 1 <= len(guess) <= 4


def _view(ids: Sequence[int]) -> Any:
    import numpy as np

    return np.array(ids, np.int32)


HEADS: Mapping[str, str] = {kind: kind for kind in (*APART, *MTP_FAMILIES)}


@pytest.fixture(scope="module", params=HEADS)
def loaded(request: Any, made: Callable[[str], Made]) -> Callable[[], Any]:
    """Loads a head anew over the reference's ops, for a model that is loaded once."""
    folder, speculative = made(request.param)

    def facts(path: str) -> Any:
        return resolve(ModelConfig(model=path, dtype="float32"), LoadConfig(), CpuPlatform())

    info = facts(str(folder))
    target = load_model(info, build_context(info))
    config = ModelConfig(model=speculative.get("model", str(folder)))
    found = find_head(speculative["method"], config, LoadConfig(), info)
    assert found is not None
    about = info.__class__(**{**vars_of(info), "config": found.config, "path": found.path})
    return lambda: load_head(found, about, build_context(about), target, load=LoadConfig())


def vars_of(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


class TestHeads(DraftHeadConformance):
    vocab_size: ClassVar[int] = VOCAB
    hidden_size: ClassVar[int] = SIZE

    @pytest.fixture(autouse=True)
    def _loaded(self, loaded: Callable[[], Any]) -> None:
        self.load = loaded

    def make(self) -> Any:
        return self.load()

    def test_another_model_of_the_same_shapes(self) -> None:
        head = self.make()
        target = head.target
        head.retarget(target)
        assert head.target is target
