"""Registering models by code, beside the entry points of ``headrace.models``."""

from __future__ import annotations

import inspect
from typing import Any

from headrace_core import plugins
from headrace_core.errors import PluginError

GROUP = "headrace.models"
_OTHERS = "vllm_config"
"""A parameter of constructors that were written for another engine."""


class ModelRegistry:
    """Where a function of ``headrace.general_plugins`` registers the models of its package."""

    @staticmethod
    def register_model(architecture: str, model_class: type[Any] | str) -> None:
        """Serve an architecture with a class; see :func:`headrace_core.plugins.register`.

        A name that headrace has itself is taken over, with a warning.

        Args:
            architecture: as ``config.json`` names it.
            model_class: a class, or ``"module:Class"``: imported only if a checkpoint needs it, so that
                the plug-in costs other models nothing and initialises no device.

        Raises:
            PluginError: neither a class nor such a text; or a class with another constructor.
            PluginConflict: another package registered the name.
        """
        if isinstance(model_class, str):
            module, _, name = model_class.partition(":")
            if not module or not name:
                raise PluginError(
                    f"model class {model_class!r} of {architecture!r}: must be a class or 'module:Class'"
                )
        else:
            check_constructor(model_class)
        plugins.register(GROUP, architecture, model_class)


def check_constructor(model_class: object) -> None:
    """Whether a model can be made of a class as the loader makes it: ``(context, prefix="")``.

    Raises:
        PluginError: it is no class, or takes something else; says what.
    """
    name = getattr(model_class, "__qualname__", repr(model_class))
    if not isinstance(model_class, type):
        raise PluginError(f"model class {name}: must be a class, not {type(model_class).__name__}")
    takes = "what is unknown"
    try:
        signature = inspect.signature(model_class)
        takes = str(signature)
        signature.bind(None)
        signature.bind(None, prefix="")
    except (TypeError, ValueError) as error:  # a ValueError: it is written in C
        hint = ". What that held, docs/extending/from-vllm.md says" if _OTHERS in takes else ""
        raise PluginError(
            f"model class {model_class.__module__}:{name} takes {takes}: its constructor must take "
            '(context, prefix=""), a headrace_core.model.BuildContext and the beginning of its '
            f"checkpoints' names ({error}){hint}"
        ) from error
