"""Passes of a stage: its part of a model's passes, in place of the model's own methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import torch

from headrace_models.stages.stage import Stream

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_models.layers.decoder import Decoder
    from headrace_models.stages.stage import Stage


class StagePasses:
    """A stage's part of the passes of a model that has been cut.

    Args:
        own: the stage's layers.
    """

    def __init__(self, model: Decoder, stage: Stage, own: range) -> None:
        self._model, self._stage, self._own = model, stage, own
        self._total = len(model.layers)

    def members(self) -> Mapping[str, object]:
        """What the model has in place of its own, by name."""
        made: dict[str, object] = {
            "forward": self.run, "forward_streams": self.run, "run_part": self.run_part,
            "ends_pass": self._stage.is_last,
        }  # fmt: skip
        if self._stage.is_first and self._stage.result is not None:
            made |= {
                "launch": self.launch,
                "expect": self.expect,
                "forward": lambda batch: self.launch(batch).result()(),
                "forward_streams": self.forward_streams,
            }
        return made

    def launch(self, batch: ForwardBatch) -> Future[Callable[[], Tensor]]:
        """See :class:`headrace_core.model.LaunchesPasses`."""
        self.run(batch)
        assert self._stage.result is not None
        receive = partial(self._stage.result.receive, self._total)
        return self._stage.result.expect(receive, self._finish)

    def expect(self, num_rows: int) -> Future[Callable[[], Tensor]]:
        """Likewise."""
        assert self._stage.result is not None
        receive = partial(self._stage.result.receive_alike, num_rows)
        return self._stage.result.expect(receive, self._finish)

    def forward_streams(
        self, batch: ForwardBatch, layers: Sequence[int]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """See :class:`headrace_core.speculation.ShowsStreams`. This stage's streams stay here; those of later
        ones come with the result."""
        shown: dict[int, Tensor] = {}
        self.run(batch, layers, shown)
        assert self._stage.result is not None
        receive = partial(self._stage.result.receive, self._total)
        stream = self._stage.result.expect(receive, lambda stream: lambda: stream).result()()
        further = [index for index in sorted(set(layers)) if index not in shown]
        if stream.shown is not None:
            shown |= zip(further, stream.shown.chunk(len(further)), strict=True)
        return self._model.finish(stream.x, stream.residual), [shown[index] for index in layers]

    def run_part(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.RunsParts`."""
        model, stage = self._model, self._stage
        batch = model.prepare_batch(batch)
        if stage.before is None:
            x, residual = model.embed_tokens(batch), None
        else:
            x, residual, _ = stage.before.receive_alike(batch.num_tokens)
        for index in self._own:
            x, residual = model.run_layer(index, x, residual, batch)
        if stage.is_last:
            x, residual = model.wanted_rows(x, residual, batch)
        for link in (stage.after, stage.result if stage.is_last else None):
            if link is not None:
                link.send_alike(Stream(x, residual))
        return x

    def run(
        self,
        batch: ForwardBatch,
        layers: Sequence[int] = (),
        shown: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """This stage's part of a pass; returns a part of what it hands on.

        Args:
            layers: those before which the stream is wanted at the first stage.
            shown: gets those of this stage, in place of the next one.
        """
        model, stage = self._model, self._stage
        batch = model.prepare_batch(batch)
        x, residual, further = self._first(batch)
        found = {} if shown is None else shown
        wanted = layers if stage.lane == 0 else ()  # the results of other lanes go nowhere
        for index in self._own:
            if index in wanted:
                found[index] = _whole(x, residual)
            x, residual = model.run_layer(index, x, residual, batch)
        if stage.is_last and self._own.stop in wanted:
            found[self._own.stop] = _whole(x, residual)
        if shown is None and found:
            further = torch.cat([*(() if further is None else (further,)), *found.values()])
        if stage.after is not None:
            stage.after.send(Stream(x, residual, further), self._own.stop)
        if stage.is_last:
            x, residual = model.wanted_rows(x, residual, batch)
            if stage.result is not None:
                stage.result.send(Stream(x, residual, further), self._own.stop)
        return x

    def _first(self, batch: ForwardBatch) -> Stream:
        """The stream that this stage begins with."""
        if self._stage.before is None:
            return Stream(self._model.embed_tokens(batch))
        return self._stage.before.receive(self._own.start)

    def _finish(self, stream: Stream) -> Callable[[], Tensor]:
        return partial(self._model.finish, stream.x, stream.residual)


def _whole(x: Tensor, residual: Tensor | None) -> Tensor:
    """The stream [T, H] in one term, memory of its own: norms write where their inputs are."""
    return x.clone() if residual is None else x + residual
