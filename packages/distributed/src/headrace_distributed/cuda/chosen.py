"""Communicators that choose an all-reduce for each tensor (:mod:`headrace_distributed.cuda.choice`).

Everything but sums over all ranks is NCCL's. What is set up is agreed upon by all ranks, so they choose
alike: the choice depends on the tensor, and on facts that were exchanged.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, HeadraceError, MissingDependency
from headrace_core.parallel import Communicator
from headrace_distributed.cuda import choice, nccl, pynccl, settings
from headrace_distributed.cuda.choice import (
    CUSTOM,
    LIMITS,
    MULTIMEM,
    NCCL,
    ONE_SHOT,
    PYNCCL,
    SYMM_MEM,
    SYMM_TWO_SHOT,
    TWO_SHOT,
    AllReduceNeed,
    Limits,
)  # fmt: skip
from headrace_distributed.cuda.custom.all_reduce import CustomAllReduce, check_triton
from headrace_distributed.cuda.custom.cudart import CudaRuntime
from headrace_distributed.cuda.devices import fully_linked
from headrace_distributed.cuda.joining import GpuRanks, meet
from headrace_distributed.cuda.libnccl import NcclLibrary
from headrace_distributed.cuda.symmetric import SymmetricAllReduce, torch_memory
from headrace_distributed.peers import on_one_host
from headrace_distributed.rendezvous import DEFAULT_TIMEOUT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a communicator is made of; others than these take their place in tests."""

    base: Callable[[GpuRanks, bool], Communicator] | None = None
    """(ranks, fixed_order) -> what does everything else; None: NCCL by ctypes, or torch's if there is no
    library."""
    custom: Callable[[GpuRanks, int], CustomAllReduce] | None = None
    """(ranks, most bytes) -> custom all-reduce; None: with CUDA's run time."""
    symm_mem: Any = None
    """torch's ``_SymmetricMemory``; None: torch's."""
    nvml: Any = None
    """The module ``pynvml``; None: imported."""


def create(
    rank: int,
    world_size: int,
    rendezvous: str,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    device: torch.device | None = None,
    fixed_order: bool | None = None,
    wanted: Sequence[str] = (SYMM_MEM, CUSTOM),
    required: Collection[str] = (),
    limits: Limits = LIMITS,
    parts: Parts | None = None,
) -> Communicator:
    """Join a group that has whatever works of custom all-reduce and symmetric memory, and NCCL.

    Args:
        rank: of this process, 0-based.
        world_size: number of ranks.
        rendezvous: ``tcp://HOST:PORT/NAME``, the same for all ranks.
        timeout: seconds to wait for another rank to join.
        device: where tensors lie; None: this process's current GPU.
        fixed_order: sums are taken in the order of ranks; None: :func:`settings.fixed_order`.
        wanted: what is tried, in this order: custom all-reduce has other sizes beside symmetric memory.
        required: what must work, of ``wanted``.
        limits: sizes at which one way becomes better than the next.

    Raises:
        ConfigError: there is no GPU, two ranks are on one, or something required does not work; says why.
        PeerTimeout: a rank has not joined in time; names it.
    """
    name = next(iter(required), "cuda")
    ranks = meet(name, rank, world_size, rendezvous, device, timeout)
    ordered = settings.fixed_order() if fixed_order is None else fixed_order
    parts = Parts() if parts is None else parts
    base, base_name = _base(ranks, ordered, parts)
    made = AdaptiveCommunicator(ranks, base, base_name, limits, ordered, parts)
    try:
        for part in wanted:
            refusal = made.set_up(part)
            if refusal and part in required:
                raise ConfigError(
                    f"parallel.communicator = {part!r}: {refusal}; 'cuda' uses what works, {base_name!r} "
                    "NCCL alone",
                    field="parallel.communicator",
                )
            if refusal and rank == 0:
                logger.info("communicator %r: no %s: %s", name, part, refusal)
    except BaseException:
        made.close()
        raise
    if rank == 0:
        logger.info("communicator %r: all-reduce: %s", name, made.describe())
    return made


create_custom = functools.partial(create, wanted=(CUSTOM,), required=(CUSTOM,))
"""See :func:`create`: custom all-reduce and NCCL."""
create_symm_mem = functools.partial(create, wanted=(SYMM_MEM,), required=(SYMM_MEM,))
"""See :func:`create`: torch's symmetric memory and NCCL."""


def _base(ranks: GpuRanks, fixed_order: bool, parts: Parts) -> tuple[Communicator, str]:
    """NCCL, and its communicator's name."""
    if parts.base is not None:
        return parts.base(ranks, fixed_order), PYNCCL
    library: NcclLibrary | None = None
    try:
        library = NcclLibrary()
        refusal = ranks.agree("libnccl", "")
    except MissingDependency as error:
        refusal = ranks.agree("libnccl", str(error))
    if library is not None and not refusal:
        return pynccl.join(ranks, library, fixed_order=fixed_order), PYNCCL
    if ranks.rank == 0:
        logger.info("NCCL through torch: %s", refusal)
    return nccl.join(ranks, fixed_order=fixed_order), NCCL


def _refusal(call: Callable[[], None]) -> str:
    """Why a call failed; "": it did not."""
    try:
        call()
    except (HeadraceError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


class AdaptiveCommunicator(Communicator):
    """Sums by the table, everything else by NCCL; see :func:`create`."""

    def __init__(
        self,
        ranks: GpuRanks,
        base: Communicator,
        base_name: str,
        limits: Limits,
        fixed_order: bool,
        parts: Parts,
    ) -> None:
        self._ranks, self._base, self._limits, self._parts = ranks, base, limits, parts
        self._custom: CustomAllReduce | None = None
        self._symmetric: SymmetricAllReduce | None = None
        self._runtime: CudaRuntime | None = None
        linked, why = fully_linked(ranks.gpus, ranks.peers, parts.nvml)
        refusal = ranks.agree("links", "" if linked else why)
        self._need = AllReduceNeed(
            num_bytes=0,
            dtype="bfloat16",
            world_size=ranks.world_size,
            capability=min(gpu.capability for gpu in ranks.gpus),
            one_host=on_one_host(ranks.peers),
            fully_linked=not refusal,
            fixed_order=fixed_order,
            available=frozenset({base_name}),
        )
        self._choose = functools.lru_cache(maxsize=4096)(self._chosen)
        self.device = ranks.device
        """Where tensors lie."""

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    def set_up(self, part: str) -> str:
        """Set up custom all-reduce or symmetric memory, on all ranks or none; returns why not, "": it is."""
        with_it = replace(self._need, available=self._need.available | {part})
        if part == CUSTOM:
            refusal = choice.custom_refusal_of_group(with_it, self._limits)
            find, make = self._find_custom, self._make_custom
        else:
            refusal = choice.symm_mem_refusal(with_it, self._limits)
            find, make = self._find_symmetric, self._make_symmetric
        # Libraries first: who lacks one would leave the others waiting for its memory.
        refusal = refusal or self._ranks.agree(f"libraries of {part}", _refusal(find))
        if refusal:
            return refusal
        refusal = self._ranks.agree(f"set up {part}", _refusal(lambda: make(with_it)))
        if refusal:
            self._drop(part)
            return refusal
        if part == SYMM_MEM and self._symmetric is not None:
            lacks = "" if self._symmetric.has_multicast else "no multicast"
            with_it = replace(
                with_it, multicast=not self._ranks.agree(f"multicast of {part}", lacks)
            )
        refusal = self._ranks.agree(f"sums of {part}", self._wrong_sums(part, with_it))
        if refusal:
            self._drop(part)
            return refusal
        self._need = with_it
        self._choose.cache_clear()
        return ""

    def _wrong_sums(self, part: str, need: AllReduceNeed) -> str:
        """Why the part's sums cannot be trusted, "": they are right. GPUs may say that they reach each
        other's memory, and read something else there."""
        at = torch.arange(4096, device=self.device) % 7 - 3
        own = ((self.rank + 1) * at).bfloat16()
        expected = (self.world_size * (self.world_size + 1) // 2 * at).bfloat16()
        names = [ONE_SHOT, TWO_SHOT] if part == CUSTOM else [MULTIMEM, SYMM_TWO_SHOT]
        if not need.multicast and MULTIMEM in names:
            names.remove(MULTIMEM)
        sums = [
            self._summed(name, own) for name in names
        ]  # all of them: the other ranks wait there
        for name, found in zip(names, sums, strict=True):
            if found is None or not torch.equal(found, expected):
                return f"{name} gave a wrong sum: the GPUs do not read what the others wrote"
        return ""

    def _find_custom(self) -> None:
        if self._parts.custom is None:
            check_triton()
            self._runtime = CudaRuntime()

    def _make_custom(self, need: AllReduceNeed) -> None:
        most = max(self._limits.custom, choice.custom_limit(need, self._limits))
        if self._parts.custom is not None:
            self._custom = self._parts.custom(self._ranks, most)
            return
        assert self._runtime is not None
        self._custom = CustomAllReduce(self._ranks, most, self._runtime)

    def _find_symmetric(self) -> None:
        if self._parts.symm_mem is None:
            torch_memory()

    def _make_symmetric(self, need: AllReduceNeed) -> None:
        most = self._limits.symm_mem[need.capability][need.world_size]
        # torch keeps names for the process's life, and an engine may be made again.
        name = self._ranks.told_by_all("symm_mem", f"headrace-{os.getpid()}-{id(self)}")[0]
        self._symmetric = SymmetricAllReduce(self._ranks, most, name, self._parts.symm_mem)

    def _drop(self, part: str) -> None:
        """Undo a set-up that another rank could not follow."""
        if part == SYMM_MEM and self._symmetric is not None:
            self._symmetric.close()
            self._symmetric = None
        if part == CUSTOM:
            custom, self._custom = self._custom, None
            if custom is not None:
                custom.unmap()
            self._ranks.agree("unmapped", "")
            if custom is not None:
                custom.free()

    def describe(self) -> str:
        """By size of a tensor of bfloat16: what adds it up, and why."""
        return choice.describe(self._need, self._limits)

    def choice_for(self, tensor: Tensor) -> choice.Choice:
        """What adds up this tensor now, and why."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self._choose(tensor.nbytes, str(tensor.dtype).removeprefix("torch."), capturing)

    def _chosen(self, num_bytes: int, dtype: str, capturing: bool) -> choice.Choice:
        need = replace(self._need, num_bytes=num_bytes, dtype=dtype, capturing=capturing)
        return choice.choose(need, self._limits)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        found = None
        if tensor.device == self.device and tensor.numel():
            found = self._summed(self.choice_for(tensor).name, tensor)
        return self._base.all_reduce(tensor) if found is None else found

    def _summed(self, name: str, tensor: Tensor) -> Tensor | None:
        """The sum by a way that is not NCCL's; None: it is."""
        if self._custom is not None and name in (ONE_SHOT, TWO_SHOT):
            return self._custom.all_reduce(tensor, two_shot=name == TWO_SHOT)
        if self._symmetric is not None and name in (MULTIMEM, SYMM_TWO_SHOT):
            return self._symmetric.all_reduce(tensor, multimem=name == MULTIMEM)
        return None

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._base.reduce_scatter(tensor, dim)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._base.all_gather(tensor, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self._base.broadcast(tensor, source)

    def barrier(self) -> None:
        self._base.barrier()

    def close(self) -> None:
        """Leave the group. The memory that others have mapped stays until the process ends: they may not
        have left yet, and CUDA forbids to free it before."""
        if self._custom is not None:
            self._custom.unmap()
        if self._symmetric is not None:
            self._symmetric.close()
        self._custom = self._symmetric = None
        self._base.close()
