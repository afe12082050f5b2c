"""Which models of the transformers backend have captured steps: each that it serves, tiny, natively run.

What came of each stands beside what the backend makes of it at all, in
``packages/models/tests/transformers_models.json``; ``python tools/transformers_page.py --measure`` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from captured import Comparison, make_worker

from headrace_core.errors import CaptureRefused
from headrace_core.graph import GraphNeed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "packages" / "models" / "tests"))
import every_causal_lm

CAPTURED = "captured"
BATCHES = ([(1, 40)], [(1, 5), (1, 9), (1, 33)], [(11, 11), (5, 30), (1, 2)])
"""(new tokens, context length) of the requests of a step."""


def outcomes(folder: Path, kinds: list[str]) -> Iterator[tuple[str, str]]:
    """``model_type``, and :data:`CAPTURED`, how replayed steps DIFFER, or why its steps run eagerly."""
    for kind in kinds:
        yield kind, _outcome(kind, folder / kind)


def _outcome(kind: str, folder: Path) -> str:
    model_class = getattr(every_causal_lm.transformers(), every_causal_lm.model_types()[kind])
    config = every_causal_lm.tiny_config(model_class.config_class, kind)
    every_causal_lm.make(model_class, config, folder)
    worker = make_worker(folder, dtype="bfloat16", model_impl="transformers", max_model_len=64)
    try:
        if worker._ready().graph is None:
            return _why_not(worker)
        compared = Comparison(worker, every_causal_lm.SMALL["vocab_size"])
        for seed, lengths in enumerate(BATCHES):
            try:
                compared.check(compared.batch(lengths, seed=seed))
            except AssertionError:
                return f"DIFFERS in a step of {lengths}"
        return CAPTURED
    finally:
        worker.close()


@torch.inference_mode()
def _why_not(worker) -> str:
    runner = worker._ready()
    graph = worker._settings.capture.factory()()
    try:
        graph.capture(runner.whole_step, GraphNeed((16,), 8, len(runner.backends)))
    except CaptureRefused as error:
        return str(error)
    return "captured only the second time"
