"""The ranks' GPUs: one each, and how they are linked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_distributed.cuda.devices import Gpu, exchange_gpus, fully_linked, parse_gpu
from headrace_distributed.peers import Peer
from headrace_distributed.rendezvous import RendezvousServer, connect

HERE = [Peer("host", 1), Peer("host", 2), Peer("host", 3)]
GPUS = [Gpu(name, (9, 0)) for name in ("a", "b", "c")]


class Nvml:
    """As much of pynvml as is asked."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        """Its only error."""

    def __init__(self, unlinked: tuple[str, str] | None = None, missing: str = "") -> None:
        self.unlinked, self.missing, self.open = unlinked, missing, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid == self.missing:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 1 if (one, other) == self.unlinked else 0


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [
        (Nvml(), (True, "NVLink joins every two GPUs")),
        (Nvml(("GPU-b", "GPU-c")), (False, "no NVLink joins ranks 1 and 2")),
        (Nvml(missing="GPU-b"), (False, "links are unknown: Not Found")),
    ],
)
def test_links(nvml: Nvml, expected: tuple[bool, str]) -> None:
    assert fully_linked(GPUS, HERE, nvml) == expected
    assert nvml.open == 0


def test_hosts_have_no_links() -> None:
    peers = [*HERE[:2], Peer("other", 3)]
    assert fully_linked(GPUS, peers, Nvml()) == (False, "the ranks are on several hosts")


def met(gpus: list[Gpu]) -> list[Any]:
    with RendezvousServer() as server, ThreadPoolExecutor(len(gpus)) as pool:
        address = server.address("tp")

        def tell(rank: int) -> Any:
            return exchange_gpus(connect(address), rank, len(gpus), gpus[rank], 20.0)

        joined = [pool.submit(tell, rank) for rank in range(len(gpus))]
        return [each.exception() or each.result() for each in joined]


def test_all_know_each_other_s_gpus() -> None:
    assert met(GPUS) == [tuple(GPUS)] * 3
    none = Gpu("", (0, 0))
    assert met([none, none]) == [(none, none)] * 2, "what is no GPU is not checked"


def test_two_ranks_on_one_gpu_are_refused_by_name() -> None:
    for error in met([GPUS[0], GPUS[1], GPUS[0]]):
        assert isinstance(error, ConfigError)
        assert str(error).startswith("ranks 0 and 2 are both on GPU a: each rank needs its own; ")


@pytest.mark.parametrize("gpu", [GPUS[0], Gpu("", (0, 0)), Gpu("x y", (12, 1))])
def test_a_gpu_travels_as_text(gpu: Gpu) -> None:
    assert parse_gpu(str(gpu)) == gpu
