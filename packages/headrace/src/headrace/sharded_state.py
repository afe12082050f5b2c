"""Saving a model as sharded state: :func:`save_sharded_state`."""

from __future__ import annotations

from pathlib import Path

from headrace.assembly import starting
from headrace.assembly.resolved import resolve_engine
from headrace_engine.config import EngineConfig


def save_sharded_state(
    config: EngineConfig,
    output: str | Path,
    *,
    tensor_parallel_size: int = 1,
    file_pattern: str | None = None,
    max_file_size: int | None = None,
) -> list[Path]:
    """Write what each rank's model would hold, and all other files of the checkpoint, to a folder that
    ``load_format="sharded_state"`` reads.

    No engine is started, and one process writes for all ranks: any machine that reads the checkpoint
    can prepare one for another.

    Args:
        config: names the model, a local folder.
        output: folder; made if need be.
        tensor_parallel_size: number of ranks to write for.
        file_pattern: file names, with ``{rank}`` and ``{part}``; default:
            ``model-rank-{rank}-part-{part}.safetensors``.
        max_file_size: bytes of a file's tensors; default: 5 GiB.

    Returns:
        The files with weights.

    Raises:
        HeadraceError: the model is no local folder, or cannot be read.
    """
    with starting() as timeline:
        resolved = resolve_engine(config)
        from headrace.assembly.worker.context import backend_chooser, build_context
        from headrace.assembly.worker.ops import choose_ops, cpu_threads
        from headrace.progress import progress_bars
        from headrace_models.formats.sharded import MAX_FILE_BYTES, PATTERN
        from headrace_models.loading.sharded_state import save_sharded_state as save

        ops = choose_ops(resolved, timeline, cpu_threads(resolved))
    with progress_bars(config.load.use_tqdm_on_load) as progress:
        return save(
            resolved.info,
            build_context(resolved, ops, backend_chooser(resolved, ops)),
            Path(output),
            world_size=tensor_parallel_size,
            load=config.load,
            pattern=file_pattern or PATTERN,
            max_file_bytes=max_file_size or MAX_FILE_BYTES,
            progress=progress,
        )
