"""Which addresses a job may be dialled to: a table, written out, because no library's idea of "global" is a wall.

Two kinds of networks are refused. What is `inside` (this machine, private networks) is where a tenant has no business
unless the platform says so: a tenant's `http_allow` opens parts of it, a worker's own setting all of it. The rest is
refused whatever anybody allows, for nothing that a job could want lives there: cloud metadata, link-local, multicast,
what is reserved, and every notation that hides an IPv4 address within an IPv6 one, where a gateway would unpack it.

What is judged is the address that is about to be dialled, never the text of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class Refused(NamedTuple):
    """A network that is not dialled, and what it is; `inside`: it can be allowed."""

    network: Network
    what: str
    inside: bool = False


def _inside(what: str, *networks: str) -> Iterable[Refused]:
    return (Refused(ip_network(network), what, True) for network in networks)


def _never(what: str, *networks: str) -> Iterable[Refused]:
    return (Refused(ip_network(network), what) for network in networks)


# The longest network that an address lies in decides. IPv6 is refused as a whole except 2000::/3, the only part of it
# that is given out for general use.
TABLE: Sequence[Refused] = sorted(
    (
        *_inside("this machine", "127.0.0.0/8", "::1/128"),
        *_inside("a private network", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
        *_inside("a carrier's network", "100.64.0.0/10"),
        *_never("a cloud's metadata", "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::/32", "fd20:ce::/32"),
        *_never("link-local", "169.254.0.0/16", "fe80::/10"),
        *_never("site-local", "fec0::/10"),
        *_never("this network", "0.0.0.0/8"),
        *_never("multicast or broadcast", "224.0.0.0/4", "255.255.255.255/32", "ff00::/8"),
        *_never("reserved", "240.0.0.0/4", "192.0.0.0/24", "::/3", "4000::/2", "8000::/1", "2001::/23"),
        *_never("documentation", "192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
        *_never("benchmarking", "198.18.0.0/15", "2001:2::/48"),
        *_never("IPv4 within IPv6", "::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"),
        *_never("IPv4 within IPv6", "2001::/32", "2002::/16", "192.88.99.0/24"),
    ),
    key=lambda refused: -refused.network.prefixlen,
)

_V4 = [(int(r.network.network_address), int(r.network.netmask), r) for r in TABLE if r.network.version == 4]
_V6 = [(int(r.network.network_address), int(r.network.netmask), r) for r in TABLE if r.network.version == 6]
_MAPPED = IPv6Network("::ffff:0:0/96")
# An ISATAP router unpacks these under any prefix (RFC 5214).
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")


def judged(address: Address) -> Refused | None:
    """Why an address is not dialled; None: anybody may."""
    if isinstance(address, IPv6Address):
        if address in _MAPPED:  # a socket would dial the IPv4 address
            return judged(IPv4Address(int(address) & 0xFFFF_FFFF))
        if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
            return Refused(IPv6Network((int(address), 128)), "IPv4 within IPv6")
    number = int(address)
    for start, mask, refused in _V4 if address.version == 4 else _V6:
        if number & mask == start:
            return refused
    return None


class Allowed:
    """What a tenant's `http_allow` opens: hosts by name, or networks; `inside`: all that can be."""

    def __init__(self, entries: Iterable[str] = (), *, inside: bool = False) -> None:
        self._inside = inside
        self._hosts: set[str] = set()
        self._networks: list[Network] = []
        for entry in entries:
            match parse_entry(entry):
                case str() as host:
                    self._hosts.add(host)
                case network:
                    self._networks.append(network)

    def refusal(self, host: str, address: str) -> str | None:
        """Why `address`, to which the URL's `host` has led, is not dialled; None: it is."""
        plain, scope, _ = address.partition("%")
        try:
            found = ip_address(plain)
        except ValueError:
            return f"{address[:64]} is no address"
        refused = Refused(ip_network(plain), "link-local") if scope else judged(found)
        if refused is None or (refused.inside and self._opens(host, found)):
            return None
        return f"{found} ({refused.what}) is not dialled" + (
            ": it is not among the hosts and networks allowed to this tenant" if refused.inside else ""
        )

    def _opens(self, host: str, address: Address) -> bool:
        if self._inside or host.rstrip(".").lower() in self._hosts:
            return True
        found = address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
        return any(found in network for network in self._networks)


def parse_entry(text: str) -> str | Network:
    """An entry of `http_allow`: a host (`vault.internal`), an address, or a network (`10.1.0.0/16`)."""
    try:
        return ip_network(text)
    except ValueError:
        host = text.rstrip(".").lower()
        # What looks like a number is an address that somebody mistyped, or 10.1.2.3/8, never a name.
        if _HOST.fullmatch(host) and not host.rpartition(".")[2].isdigit():
            return host
    raise ValueError("is neither a host such as vault.internal nor a network such as 10.1.0.0/16")


def check_entry(text: str) -> None:
    """Refuse an entry that opens nothing: one that is not read, or a network of which no part can be allowed."""
    entry = parse_entry(text)
    if isinstance(entry, str):
        return
    if not any(r.inside and r.network.version == entry.version and r.network.overlaps(entry) for r in TABLE):
        known = judged(entry[0])
        what = f"is {known.what}, which is never dialled" if known else "can be dialled without being allowed"
        raise ValueError(what)
