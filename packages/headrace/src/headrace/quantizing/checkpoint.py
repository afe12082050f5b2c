"""Writing a checkpoint in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.assembly import starting
from headrace.assembly.resolved import resolve_engine
from headrace.engine_args import EngineArgs
from headrace_core import plugins

if TYPE_CHECKING:
    from headrace_models.loading.quantized_copy import Copied

GROUP = "headrace.weight_encoders"


def quantize_checkpoint(
    args: EngineArgs, to: str, folder: str | Path, *, with_head: bool = False
) -> Copied:
    """Write a checkpoint with its linear layers in another format.

    Args:
        args: name the model, a checkpoint in floats.
        to: name of a format (``headrace plugins`` lists them).
        folder: created if need be. An unfinished run of the same settings goes on.
        with_head: quantize ``lm_head`` too.

    Raises:
        PluginNotFound: the format is unknown; names the nearest.
        HeadraceError: the model cannot be read, is quantized already, or has no layer that fits.
    """
    encoder = plugins.load(GROUP, to)()
    config = args.create_engine_config()
    with starting() as timeline:
        resolved = resolve_engine(config)
        from headrace.assembly.worker.context import backend_chooser, build_context
        from headrace.assembly.worker.ops import choose_ops, cpu_threads
        from headrace.progress import progress_bars
        from headrace_models.loading.quantized_copy import write_quantized

        ops = choose_ops(resolved, timeline, cpu_threads(resolved))
        context = build_context(resolved, ops, backend_chooser(resolved, ops))
    with progress_bars(config.load.use_tqdm_on_load) as progress:
        return write_quantized(
            resolved.info, context, encoder, Path(folder), with_head=with_head, load=config.load,
            progress=progress,
        )  # fmt: skip
