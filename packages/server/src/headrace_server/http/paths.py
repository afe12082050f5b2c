"""Paths as the router sees them, and those that anybody may ask for."""

from __future__ import annotations

from starlette.types import Scope

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping", "/version"})
"""Health checks: no key needed, answered while draining."""

MODEL_PATHS = frozenset({"/models", "/models/load", "/models/unload"})
"""Control of which models a server of several has."""

ROUTER_PATHS = frozenset({"/router/servers", "/router/drain", "/router/undrain"})
"""Control of a router's servers."""

CONTROL_PATHS = frozenset({
    "/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/reset_mm_cache", "/start_profile",
    "/stop_profile", "/sleep", "/wake_up", "/is_sleeping", "/swap_weights", "/weights_version",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep", "/collective_rpc", "/server_info", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/update_weights", "/init_weight_update_group", "/open_weight_stream",
    "/close_weight_transfer",
})  # fmt: skip
"""Routes that change or show the engine itself; always behind a key (ADR 0028)."""


def below_root(path: str, root: str) -> str:
    """``path`` without the prefix ``root``, if it has it as a whole first part."""
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("/", ""):
        return path[len(root) :]
    return path


def route_path(scope: Scope) -> str:
    """The decoded path that routes are matched against."""
    return below_root(scope["path"], scope.get("root_path", ""))


def raw_route_path(scope: Scope) -> str:
    """The same as it stood on the wire."""
    raw = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
    return below_root(raw, scope.get("root_path", ""))
