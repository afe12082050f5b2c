"""Memory that sleeps, over a driver whose device is this process's memory."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from headrace_core.errors import CapacityError, ConfigError, EngineError, UnsupportedFeature
from headrace_kernels.cuda import memory_pool
from headrace_kernels.cuda.memory_pool import LIBRARY, CudaMemoryPool

PAGE = 2 << 20
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_library = pytest.mark.skipif(
    not LIBRARY.exists() or COMPILER is None,
    reason="the library was not built, or there is no C++ compiler for the driver's stand-in",
)


class Device:
    """The stand-in, and a pool over it. torch's part is played by calls of the library's allocator."""

    def __init__(self, driver: Path) -> None:
        self.driver = ctypes.CDLL(str(driver))
        self.driver.fake_used.restype = ctypes.c_size_t
        self.driver.fake_limit.argtypes = [ctypes.c_size_t]
        self.pool = CudaMemoryPool(str(driver), lambda tag: contextlib.nullcontext())
        self._library = ctypes.CDLL(str(LIBRARY))
        self._library.headrace_pool_malloc.restype = ctypes.c_void_p
        self._library.headrace_pool_malloc.argtypes = [
            ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        self._library.headrace_pool_free.argtypes = [
            ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        self._held: dict[int, int] = {}

    @property
    def used(self) -> int:
        return int(self.driver.fake_used())

    def allocate(self, size: int) -> int:
        address = self._library.headrace_pool_malloc(size, 0, None)
        if address:
            self._held[address] = size
        return address or 0

    def free(self, address: int) -> None:
        self._library.headrace_pool_free(address, self._held.pop(address), 0, None)

    def bytes_at(self, address: int) -> torch.Tensor:
        """[size] uint8 over the memory itself."""
        array = (ctypes.c_uint8 * self._held[address]).from_address(address)
        return torch.frombuffer(array, dtype=torch.uint8)

    def close(self) -> None:
        for address in list(self._held):
            self.free(address)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("driver") / "libfake.so"
    source = Path(__file__).with_name("fake_driver.cpp")
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-O1", str(source), "-o", str(made)], check=True
    )
    return made


@pytest.fixture
def device(driver: Path):
    made = Device(driver)
    yield made
    made.driver.fake_limit(2**62)
    made.close()
    assert made.used == 0


@needs_library
def test_what_is_kept_comes_back_to_its_address(device: Device) -> None:
    with device.pool.use("weights"):
        one, two = device.allocate(3 * PAGE), device.allocate(1000)
    with device.pool.use("kv_cache"):
        cache = device.allocate(5 * PAGE)
    device.bytes_at(one).random_(0, 256)
    device.bytes_at(two).fill_(7)
    before = device.bytes_at(one).clone()
    assert (device.pool.num_bytes("weights"), device.pool.num_bytes("kv_cache")) == (
        4 * PAGE,
        5 * PAGE,
    )
    device.pool.sleep(tags=["weights", "kv_cache"], kept=["weights"])
    assert device.used == device.pool.num_bytes("weights") == device.pool.num_bytes("kv_cache") == 0
    assert device.pool.num_kept_bytes("weights") == 4 * PAGE
    assert device.pool.num_kept_bytes("kv_cache") == 0
    device.pool.wake(["weights"])
    assert (device.used, device.pool.num_kept_bytes("weights")) == (4 * PAGE, 0)
    assert torch.equal(device.bytes_at(one), before)
    assert bool((device.bytes_at(two) == 7).all())
    device.pool.wake(["weights", "kv_cache"])  # what is awake stays as it is
    assert device.used == 9 * PAGE
    device.bytes_at(cache).fill_(1)
    assert torch.equal(device.bytes_at(one), before)


@needs_library
def test_pools_do_not_share_tags(device: Device, driver: Path) -> None:
    other = CudaMemoryPool(str(driver), lambda tag: contextlib.nullcontext())
    with device.pool.use("weights"):
        device.allocate(PAGE)
    with other.use("weights"):
        device.allocate(PAGE)
    device.allocate(PAGE)
    device.pool.sleep(tags=["weights"])
    assert (device.used, other.num_bytes("weights")) == (2 * PAGE, PAGE)


@needs_library
def test_memory_that_is_freed_asleep_is_gone(device: Device) -> None:
    with device.pool.use("weights"):
        one = device.allocate(PAGE)
    device.pool.sleep(tags=["weights"], kept=["weights"])
    device.free(one)
    device.pool.wake(["weights"])
    assert device.used == device.pool.num_kept_bytes("weights") == 0


@needs_library
def test_a_full_device_is_said_and_waking_can_be_repeated(device: Device) -> None:
    with device.pool.use("weights"):
        addresses = [device.allocate(PAGE) for _ in range(3)]
    for number, address in enumerate(addresses):
        device.bytes_at(address).fill_(number + 1)
    device.pool.sleep(tags=["weights"], kept=["weights"])
    device.driver.fake_limit(2 * PAGE)
    with pytest.raises(CapacityError, match=r"the 2\.0 MiB that 'weights' lacks.*OUT_OF_MEMORY"):
        device.pool.wake(["weights"])
    device.driver.fake_limit(3 * PAGE)
    device.pool.wake(["weights"])
    assert [int(device.bytes_at(address)[-1]) for address in addresses] == [1, 2, 3]
    with device.pool.use("weights"):
        assert device.allocate(PAGE) == 0, "no memory: torch makes an error of it"


@needs_library
def test_a_driver_that_fails_leaves_nothing_behind(device: Device) -> None:
    with device.pool.use("weights"):
        device.allocate(PAGE)
        device.driver.fake_break_maps(1)
        assert device.allocate(PAGE) == 0
    assert device.used == PAGE
    device.pool.sleep(tags=["weights"], kept=["weights"])
    device.driver.fake_break_maps(1)
    with pytest.raises(EngineError, match=r"map: CUDA_ERROR_UNKNOWN \(1\)"):
        device.pool.wake(["weights"])
    assert device.used == 0
    device.pool.wake(["weights"])


@needs_library
def test_no_driver_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh = Path(shutil.copy(LIBRARY, tmp_path / "fresh.so"))  # in which no driver is open
    monkeypatch.setattr(memory_pool, "LIBRARY", fresh)
    with pytest.raises(UnsupportedFeature, match=r"CUDA's driver 'libnosuch\.so' cannot be used"):
        CudaMemoryPool("libnosuch.so")
    with pytest.raises(UnsupportedFeature, match="the driver has no function cuInit"):
        CudaMemoryPool(ctypes.util.find_library("c") or "libc.so.6")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_torch_maps_itself_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ConfigError, match=rf"{name} = .* must be without expandable_segments:True"):
        CudaMemoryPool()


def test_a_library_that_was_not_built_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_pool, "LIBRARY", tmp_path / "headrace_cuda_memory.so")
    with pytest.raises(
        ImportError, match=r"sleep on CUDA devices needs 'headrace_cuda_memory\.so'"
    ):
        CudaMemoryPool()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: never run")
def test_a_tensor_sleeps_on_a_device() -> None:
    pool = CudaMemoryPool()
    with pool.use("weights"):
        tensor = torch.arange(1 << 22, device="cuda")
    address, free = tensor.data_ptr(), torch.cuda.mem_get_info()[0]
    pool.sleep(tags=["weights"], kept=["weights"])
    assert torch.cuda.mem_get_info()[0] >= free + tensor.nbytes
    pool.wake(["weights"])
    assert tensor.data_ptr() == address
    assert torch.equal(tensor.cpu(), torch.arange(1 << 22))
