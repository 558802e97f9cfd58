"""Whom a job may dial: the table against what is known of it, and every way to write an IPv4 address within IPv6."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.addresses import TABLE, Address, Allowed, check_entry, judged, parse_entry

V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)
NEAR = st.sampled_from(TABLE).flatmap(
    lambda r: st.integers(int(r.network[0]), int(r.network[-1])).map(lambda n: type(r.network[0])(n))
)
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001:82b::200e", "::ffff:8.8.8.8"]
INSIDE = ["127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "::1"]
NEVER = [
    *("169.254.169.254", "169.254.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192", "192.0.0.170", "0.0.0.0"),
    *("0.1.2.3", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "198.18.0.1", "203.0.113.7"),
    *("192.0.2.1", "198.51.100.1", "192.88.99.1", "::", "fe80::1", "fec0::1", "ff02::1", "fd00:ec2::254"),
    *("fd20:ce::254", "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::"),
    *("2002:7f00:1::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "::7f00:1", "::ffff:0:7f00:1", "2001:db8::1"),
    *("2001:10::1", "3fff::1", "100::1", "4000::1", "5f00::1", "::ffff:169.254.169.254", "2a00::5efe:7f00:1"),
]


@pytest.mark.parametrize("text", PUBLIC)
def test_what_is_public_is_dialled(text: str) -> None:
    assert judged(ip_address(text)) is None and Allowed().refusal("x.example", text) is None


@pytest.mark.parametrize("text", [*INSIDE, "fc00::1", "fd12:3456::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1"])
def test_what_is_inside_is_dialled_if_it_is_allowed(text: str) -> None:
    assert "not among the hosts" in (Allowed().refusal("x.example", text) or "")
    assert Allowed(["x.example"]).refusal("X.example.", text) is None
    assert Allowed(inside=True).refusal("x.example", text) is None
    assert Allowed(["y.example", "example"]).refusal("x.example", text) is not None
    plain = ip_address(text)
    found = (plain.ipv4_mapped or plain) if isinstance(plain, IPv6Address) else plain
    assert Allowed([str(found)]).refusal("x.example", text) is None


@pytest.mark.parametrize("text", NEVER)
def test_the_rest_is_dialled_by_nobody(text: str) -> None:
    everything = ["x.example", "0.0.0.0/0", "::/0"]
    assert "is not dialled" in (Allowed(everything, inside=True).refusal("x.example", text) or "")


@pytest.mark.parametrize("text", ["fe80::1%eth0", "127.0.0.1%lo", "localhost", "", "1.2.3", "2130706433"])
def test_what_is_no_plain_address_is_not_dialled(text: str) -> None:
    assert Allowed(["x.example"], inside=True).refusal("x.example", text) is not None


def slowly(address: Address) -> tuple[str, bool] | None:
    """Of all networks in the table that hold an address, what the longest one says."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return slowly(address.ipv4_mapped)
    if isinstance(address, IPv6Address) and address.exploded[20:29] in ("0000:5efe", "0200:5efe"):
        return "IPv4 within IPv6", False
    holding = [r for r in TABLE if r.network.version == address.version and address in r.network]
    longest = max(holding, key=lambda r: r.network.prefixlen, default=None)
    return None if longest is None else (longest.what, longest.inside)


@given(V4 | V6 | NEAR)
def test_the_longest_network_decides(address: Address) -> None:
    found = judged(address)
    assert (None if found is None else (found.what, found.inside)) == slowly(address)


@given(V4)
def test_an_address_within_another_opens_no_door(address: IPv4Address) -> None:
    number = int(address)
    mapped = judged(IPv6Address(0xFFFF << 32 | number))
    assert mapped == judged(address), "a socket dials what is mapped"
    prefixes = (0, 0x64FF9B << 96, 0x64FF9B0001 << 80, 0xFFFF << 48)
    hidden = [IPv6Address(prefix | number) for prefix in prefixes if prefix | number != 1]
    hidden += [IPv6Address(0x2002 << 112 | number << 80), IPv6Address(0x20010000 << 96 | (number ^ 0xFFFFFFFF))]
    for address_ in hidden:
        found = judged(address_)
        assert found is not None and not found.inside, address_


@given(V6)
def test_ipv6_is_refused_but_for_what_is_given_out(address: IPv6Address) -> None:
    if judged(address) is None:
        assert address.ipv4_mapped or address in ip_network("2000::/3")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("10.1.0.0/16", ip_network("10.1.0.0/16")),
        ("10.1.2.3", ip_network("10.1.2.3/32")),
        ("fd12::/32", ip_network("fd12::/32")),
        ("Vault.Internal.", "vault.internal"),
        ("localhost", "localhost"),
        ("_srv.x-y.example", "_srv.x-y.example"),
        *((wrong, None) for wrong in ("", "10.1.2.3/8", "1.2.3", "0x7f.1.999", "*.example", "a b", "http://x", "x:80")),
        *((wrong, None) for wrong in ("x/y", "-x", "a..b", "a" * 64, ".", "é.example", "user@x", "x\n")),
    ],
)
def test_an_entry_is_a_host_or_a_network(text: str, read: object) -> None:
    if read is None:
        with pytest.raises(ValueError, match=r"host|network"):
            parse_entry(text)
    else:
        assert parse_entry(text) == read


def test_an_entry_that_opens_nothing_is_refused() -> None:
    for good in ("127.0.0.1", "10.0.0.0/8", "192.168.0.0/16", "fd12:3456::/32", "db.internal", "0.0.0.0/0"):
        check_entry(good)
    for never in ("169.254.169.254", "224.0.0.0/4", "64:ff9b::/96"):
        with pytest.raises(ValueError, match="never dialled"):
            check_entry(never)
    with pytest.raises(ValueError, match="without being allowed"):
        check_entry("8.8.8.0/24")
