"""Composition: the only package that knows all packages.

From a configuration: resolve the checkpoint, choose platform, kernels, quantization and attention, and
hand the executor a function that builds the worker. :func:`build_core` does this in whichever process
the engine's core lives in; :func:`connect` makes the client that a server or ``LLM`` talks to. Each
call assembles one engine and shares nothing with another: a process may hold several.

=============  ==================================================================================
``named``      what a configuration names is looked up, before anything is read
``resolved``   configuration -> checkpoint, platform, and no setting left open
``plugged``    plug-ins that the configuration names: tokenizer, logits processors, reasoning
``served``     checkpoint -> what front ends say of the model and check requests against
``media``      what prompts bring besides text: the model's processor
``templates``  how chats are rendered
``footprint``  what a model takes of the memory, told without loading it
``front``      input processing and the way to a core; ``connect`` and ``front_end`` start here
``core``       scheduler, cache, executor: what lives in the engine's process
``worker``     the model: ops bound, quantization and attention chosen, weights read
=============  ==================================================================================
"""

from headrace.assembly.core import build_core, build_resolved_core
from headrace.assembly.front import (
    FrontEnd,
    connect,
    front_end,
    shared_core,
    start_engine,
    starting,
)
from headrace.assembly.named import kv_scale_constants
from headrace.assembly.resolved import ResolvedConfig, choose_platform, resolve_engine
from headrace.assembly.served import default_sampling_params, served_model
from headrace.assembly.templates import TemplateSettings, templates_of
from headrace.assembly.worker.factory import worker_factory
from headrace.assembly.worker.model import build_model
from headrace.assembly.worker.ops import choose_ops, cpu_threads

__all__ = [
    "FrontEnd",
    "ResolvedConfig",
    "TemplateSettings",
    "build_core",
    "build_model",
    "build_resolved_core",
    "choose_ops",
    "choose_platform",
    "connect",
    "cpu_threads",
    "default_sampling_params",
    "front_end",
    "kv_scale_constants",
    "resolve_engine",
    "served_model",
    "shared_core",
    "start_engine",
    "starting",
    "templates_of",
    "worker_factory",
]
