"""Addresses of tool servers: ``host:port``, several separated by commas, or ``demo``."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from headrace_core.errors import ConfigError

DEMO = "demo"
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,62})(\.[a-z0-9]([a-z0-9-]{0,62}))*\Z", re.I)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a tool server listens."""

    host: str
    """An IPv4 address, an IPv6 address without brackets, or a host name."""
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_addresses(text: str) -> tuple[Address, ...]:
    """The addresses of a ``--tool-server`` value that is not ``demo``.

    Raises:
        ConfigError: naming the part that is no address, or is there twice.
    """
    found: list[Address] = []
    for part in text.split(","):
        address = _parse(part.strip())
        if address in found:
            raise ConfigError(f"tool_server: {part.strip()!r} is given twice", field="tool_server")
        found.append(address)
    return tuple(found)


def _parse(part: str) -> Address:
    host, _, port = part.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        good, host = _is_ip(host[1:-1], 6), host[1:-1]
    else:
        good = _is_ip(host, 4) or (bool(_NAME.match(host)) and not host.replace(".", "").isdigit())
    if not (good and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(
            f"tool_server: {part!r} must be host:port, the host an IPv4 address, an IPv6 address "
            f"in brackets or a host name; or {DEMO!r} alone",
            field="tool_server",
        )
    return Address(host, int(port))


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False
