"""Recording a worker's steps, between a start and a stop that come from outside.

A step that was captured is one native call and one line of a trace; ``--enforce-eager`` shows the
operations inside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_engine.config import ProfilerConfig

logger = logging.getLogger(__name__)

STEP_MARK = "headrace.step"
"""Name of a whole step in a trace."""


class _Recording(Protocol):
    """One recording that runs."""

    def finish(self) -> None: ...


class StepProfiler:
    """Counts the steps of one worker and records those that the settings ask for. One thread.

    Args:
        config: see :class:`~headrace_core.config.ProfilerConfig`.
        device: the worker's.
        rank: part of the file names.
    """

    def __init__(self, config: ProfilerConfig, device: torch.device, rank: int = 0) -> None:
        self._config = config
        self._device = device
        self._rank = rank
        self.armed = False
        """Between a start and a stop: :meth:`step` is to be around each step."""
        self._num_steps = 0
        """Since the start was asked for."""
        self._recording: _Recording | None = None

    def start(self) -> None:
        """Record after ``delay_iterations`` more steps.

        Raises:
            UnsupportedFeature: no profiler is configured, or not for this device.
            RequestError: it records already.
        """
        self._check()
        if self.armed:
            raise RequestError("start_profile: a profile is being recorded already")
        self.armed, self._num_steps = True, 0
        if self._config.delay_iterations == 0:
            self._begin()

    def stop(self) -> None:
        """End and write; nothing recorded: nothing happens."""
        self._check()
        self.armed = False
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.finish()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step; only needed while :attr:`armed`."""
        if not self.armed:
            yield
            return
        if self._recording is None:
            yield
        else:
            with torch.profiler.record_function(STEP_MARK):
                yield
        self._num_steps += 1
        config = self._config
        if self._recording is None and self._num_steps >= config.delay_iterations:
            self._begin()
        elif config.max_iterations and (
            self._num_steps >= config.delay_iterations + config.max_iterations
        ):
            self.stop()

    def _begin(self) -> None:
        if self._config.profiler == "cuda":
            self._recording = _CudaRange()
        else:
            self._recording = _TorchTrace(self._config, self._device, self._rank)

    def _check(self) -> None:
        if self._config.profiler is None:
            raise UnsupportedFeature(
                "no profiler is configured; start with --profiler-config.profiler torch "
                "--profiler-config.torch_profiler_dir /a/folder"
            )
        if self._config.profiler == "cuda" and self._device.type != "cuda":
            raise UnsupportedFeature(
                f"profiler 'cuda' cannot record on {self._device.type}; use 'torch'"
            )


class _CudaRange:
    """Switches a profiler that is attached from outside on and off."""

    def __init__(self) -> None:
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


class _TorchTrace:
    """A trace in Chrome's format, as torch writes it, and a table of what took longest."""

    def __init__(self, config: ProfilerConfig, device: torch.device, rank: int) -> None:
        self._config = config
        self._on_gpu = device.type == "cuda"
        self._name = f"headrace-rank{rank}-{os.getpid()}-{time.time_ns() // 1_000_000}"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        self._profile.start()

    def finish(self) -> None:
        """Write the files under their final names only once they are whole."""
        self._profile.stop()
        folder = Path(self._config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        suffix = ".pt.trace.json" + (".gz" if self._config.torch_profiler_use_gzip else "")
        trace = folder / (self._name + suffix)
        unfinished = folder / f".{trace.name}"
        self._profile.export_chrome_trace(str(unfinished))
        unfinished.rename(trace)
        logger.info("profile written: %s", trace)
        if self._config.torch_profiler_dump_cuda_time_total:
            order = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
            table = self._profile.key_averages().table(sort_by=order, row_limit=100)
            (folder / f"{self._name}.txt").write_text(table, encoding="utf-8")
