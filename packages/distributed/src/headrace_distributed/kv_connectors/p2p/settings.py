"""Settings of connectors whose engines give blocks to each other."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError
from headrace_distributed.kv_connectors.extra import FIELD, extra_of, wrong
from headrace_distributed.kv_connectors.p2p.peer import Address
from headrace_distributed.kv_connectors.p2p.ranks import RankLayout, rank_port

HOST, PORT, BUFFER = "127.0.0.1", 14579, 10**9
PEERS, SECRET, ADVERTISED = "peers", "secret_file", "advertised_host"
TRUST = "trust_network"
KEEP, WAIT, WORKERS = "keep_seconds", "fetch_timeout", "num_workers"
KNOWN = (PEERS, SECRET, ADVERTISED, KEEP, WAIT, WORKERS)
MIN_SECRET, MAX_SECRET = 16, 4096


class PeerSettings(NamedTuple):
    """See ``docs/kv-transfer.md``."""

    address: Address
    """Where this rank gives blocks away."""
    advertised_host: str
    """Under which others reach it."""
    engine_id: str
    buffer_bytes: int
    """This rank's share."""
    secret: bytes
    peers: tuple[Address, ...]
    """Engines that are asked, and whose address a request may name; (): a request may name loopback."""
    keep_seconds: float
    fetch_timeout: float
    num_workers: int
    layout: RankLayout
    """This rank's place in the engine."""

    def allows(self, address: Address) -> bool:
        """True if a request may name an engine."""
        if address in self.peers:
            return True
        return not self.peers and is_loopback(address.host)


def peer_settings(settings: Mapping[str, Any], *more: str) -> PeerSettings:
    """The settings of a connector, checked.

    Args:
        more: names in the extra config that the connector reads itself.

    Raises:
        ConfigError: naming the setting.
    """
    extra = extra_of(settings, *KNOWN, *more, has_peers=True)
    host = settings.get("kv_ip", HOST)
    secret = _secret(extra)
    peers = tuple(map(_address, _listed(extra)))
    far = [one for one in (host, *(peer.host for peer in peers)) if not is_loopback(one)]
    if far and not secret:
        raise wrong(SECRET, None, f"given with the address {far[0]!r}, which is not loopback")
    advertised = extra.get(ADVERTISED, host)
    if not isinstance(advertised, str) or advertised in ("", "0.0.0.0", "::"):
        raise wrong(ADVERTISED, extra.get(ADVERTISED), f"given with kv_ip = {host!r}: the host "
                    "under which other engines reach this one")  # fmt: skip
    workers = extra.get(WORKERS, 4)
    if type(workers) is not int or not 1 <= workers <= 64:
        raise wrong(WORKERS, workers, "1 to 64")
    engine_id = settings.get("engine_id") or secrets.token_hex(16)
    if len(engine_id.encode()) > 255:
        raise ConfigError(f"{FIELD}.engine_id = {engine_id!r:.100}: must be at most 255 bytes",
                          field=f"{FIELD}.engine_id")  # fmt: skip
    layout = RankLayout.of(settings)
    return PeerSettings(
        address=Address(host, rank_port(settings.get("kv_port", PORT), layout)),
        advertised_host=advertised,
        engine_id=engine_id,
        buffer_bytes=max(1, int(settings.get("kv_buffer_size", BUFFER)) // layout.num_ranks),
        secret=secret,
        peers=peers,
        keep_seconds=_seconds(extra, KEEP, 480.0),
        fetch_timeout=_seconds(extra, WAIT, 10.0),
        num_workers=workers,
        layout=layout,
    )


def _secret(extra: Mapping[str, Any]) -> bytes:
    stated = extra.get(SECRET)
    if stated is None:
        return b""
    accepted = f"a file with a secret of {MIN_SECRET} to {MAX_SECRET} bytes"
    if not isinstance(stated, str):
        raise wrong(SECRET, stated, accepted)
    try:
        with Path(stated).open("rb") as file:
            secret = file.read(MAX_SECRET + 2).strip()
    except OSError as error:
        raise wrong(SECRET, stated, f"{accepted}: {error.strerror}") from error
    if not MIN_SECRET <= len(secret) <= MAX_SECRET:
        raise wrong(SECRET, stated, accepted)
    return secret


def _listed(extra: Mapping[str, Any]) -> list[object]:
    stated = extra.get(PEERS, [])
    if not isinstance(stated, list):
        raise wrong(PEERS, stated, "a list of host:port")
    return stated


def _address(stated: object) -> Address:
    host, _, port = str(stated).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise wrong(PEERS, stated, "host:port of an engine")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def _seconds(extra: Mapping[str, Any], name: str, default: float) -> float:
    value = extra.get(name, default)
    if type(value) not in (int, float) or not 0 < value <= 86400:
        raise wrong(name, value, "seconds, above 0, at most 86400")
    return float(value)


def check_trust(extra: Mapping[str, Any], library: str) -> None:
    """Have the operator say that the network is his, where a library guards nothing.

    Raises:
        ConfigError: he does not.
    """
    if extra.get(TRUST) is not True:
        raise wrong(TRUST, extra.get(TRUST), f"true: whoever reaches the ports of {library} can read and "
                    "write the blocks, whatever the secret")  # fmt: skip


def is_loopback(host: str) -> bool:
    """True for an address of this machine that no other reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
