"""The loader's side of weights that were packed before the model was built."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace_models.loading.ahead.plan import (
    Identity,
    KeptPlan,
    PackPlan,
    Source,
    identity_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.ops import LinearOp, PackedLinear

logger = logging.getLogger(__name__)


class Packer(Protocol):
    """Packs weights in a thread: ``headrace_kernels.cpu.packing_ahead.PackingAhead``."""

    expects_file: bool
    """True if the weights are to come from another file than the checkpoint's."""

    def wait(self) -> int:
        """Wait for it; bytes of packed weights that nobody has taken."""

    def take(self, name: str, op: LinearOp) -> PackedLinear | None:
        """A packed weight by its leaf's path, once; None: it is not there, or not as the op packs."""

    @property
    def is_mapped(self) -> bool:
        """True if the weights are pages of a file, which take no memory from anybody. Known after
        :meth:`wait`."""

    def close(self) -> None:
        """End it, and give back what nobody has taken."""


class WeightsAhead:
    """Weights that are packed while torch is imported, and the plan for the next start.

    Args:
        folder: of the checkpoint.
        kept: where the plan is kept.
        plan: by which weights are packed; None: there was none, or it does not fit.
        packer: packs them; None: nothing is packed.
        smallest: bytes of the weights that the next start is to pack.
        keep: told when the start is over, with the plan of what was loaded; None: nobody is.
    """

    def __init__(
        self,
        folder: Path,
        kept: KeptPlan,
        plan: PackPlan | None = None,
        packer: Packer | None = None,
        *,
        smallest: int,
        keep: Callable[[PackPlan], None] | None = None,
    ) -> None:
        self._folder, self._kept = folder, kept
        self._plan, self._packer = plan, packer
        self._smallest, self._keep = smallest, keep
        self._loaded: PackPlan | None = None
        if packer is not None:
            # A start that fails forgets this object; memory and thread go with it.
            weakref.finalize(self, packer.close)
        self._checked: frozenset[Source] = frozenset()
        self._raw: dict[str, tuple[Path, int, tuple[int, ...]]] = {}
        self._before: dict[str, Identity] = {}
        self._noted: dict[str, tuple[Source, ...]] = {}
        self._taken: set[Source] = set()

    def wait(self) -> int:
        """Wait for what is packed; returns its bytes."""
        return 0 if self._packer is None else self._packer.wait()

    def reserved(self) -> int:
        """Wait for it, too; the bytes of it that do not count as free: pages of a file do."""
        if self._packer is None:
            return 0
        resident = self._packer.wait()
        return 0 if self._packer.is_mapped else resident

    @property
    def expects_file(self) -> bool:
        """True if the weights are to come from another file than the checkpoint's."""
        return self._packer is not None and self._packer.expects_file

    def begin(self) -> None:
        """The checkpoint's files are read from now on: what was packed of others is given back."""
        if self._packer is None or self._plan is None:
            return
        if not self._plan.is_current(self._folder):
            logger.info("%s: has changed while it was packed: packed again", self._folder)
            self.close()
            return
        parts = (part for parts in self._plan.weights.values() for part in parts)
        self._checked = frozenset(parts)

    def watched(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """A file's tensors as they are, noting where each lies: whether one arrives as the file has it is
        seen by that."""
        from headrace_models.formats.rank_parts import is_part  # which imports torch

        for name, tensor, file in tensors:
            if file.parent == self._folder and not is_part(file):
                if file.name not in self._before:
                    self._before[file.name] = identity_of(file)
                self._raw[name] = file, tensor.data_ptr(), tuple(tensor.shape)
            yield name, tensor, file

    def is_checked(self, name: str, tensor: Tensor, file: Path) -> bool:
        """True if the tensor is its file's, which an earlier start found to be finite."""
        source = self._source(name, tensor, file)
        return source is not None and source in self._checked

    def take(self, leaf: str, parts: Sequence[tuple[str, Tensor, Path]], shape: Sequence[int], dtype: str,
             op: LinearOp) -> PackedLinear | None:  # fmt: skip
        """The leaf's weight, packed of these tensors in this order; None: it is not. Notes it for the plan.

        Args:
            parts: name, the rows that the leaf takes, file.
            shape: of the whole.
            dtype: that the leaf wants.
        """
        sources = [self._source(*part) for part in parts]
        found = tuple(source for source in sources if source is not None)
        if len(found) < len(sources) or len(shape) != 2:
            return None
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor, _ in parts)
        once = self._taken.isdisjoint(found) and len({*found}) == len(found)
        if num_bytes >= self._smallest and once:
            self._noted[leaf] = found
            self._taken.update(found)
        if self._plan is None or self._packer is None or self._plan.weights.get(leaf) != found:
            return None
        packed = self._packer.take(leaf, op)
        if packed is None or packed.dtype != dtype:
            return None
        return packed if (packed.out_features, packed.in_features) == tuple(shape) else None

    def end(self) -> None:
        """All weights are loaded: keep the plan, unless it is that which was found."""
        self.close()
        files = {name for parts in self._noted.values() for name, _ in parts}
        try:
            now = {name: identity_of(self._folder / name) for name in files}
        except OSError:
            return
        plan = PackPlan(now, self._noted)
        if not self._noted or any(now[f] != self._before[f] for f in files):
            return
        if plan != self._plan:
            self._kept.keep(plan)
        self._loaded = plan

    def started(self) -> None:
        """The start is over: what takes time may be done for the next one."""
        if self._keep is not None and self._loaded is not None:
            self._keep(self._loaded)

    def close(self) -> None:
        """Give back what nobody has taken. May be called at any time, and again."""
        if self._packer is not None:
            self._packer.close()
        self._packer, self._checked = None, frozenset()

    def _source(self, name: str, tensor: Tensor, file: Path) -> Source | None:
        """Where a whole tensor lies in the checkpoint's folder; None: it was made of something else, is a
        part or a view of another shape."""
        place = file, tensor.data_ptr(), tuple(tensor.shape)
        if self._raw.get(name) != place or not tensor.is_contiguous():
            return None
        return file.name, name
