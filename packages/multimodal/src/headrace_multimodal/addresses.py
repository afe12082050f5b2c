"""Network addresses that clients may make a server fetch from."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_V4_COMPATIBLE = ipaddress.ip_network("::/96")


def is_public(text: str) -> bool:
    """True if an address is on the public internet, and so is every address hidden in it.

    Loopback, private, link-local (where clouds keep their metadata), multicast, reserved and
    documentation addresses are not; nor are IPv6 addresses that stand for such IPv4 ones (mapped,
    compatible, NAT64, 6to4, Teredo). Anything that is no address is not public.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return all(a.is_global and not a.is_multicast and not a.is_reserved for a in _seen_as(address))


def _seen_as(address: Address) -> Iterator[Address]:
    """The address, and the IPv4 addresses that it may lead to."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    if address in _NAT64:
        yield low
        return
    yield address
    if address in _V4_COMPATIBLE:
        yield low
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
