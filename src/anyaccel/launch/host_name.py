# SPDX-License-Identifier: Apache-2.0
"""Whether a text can be the name or the address of a host, before it is resolved."""

from __future__ import annotations

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_ADDRESS_CHARACTERS = frozenset("0123456789abcdefABCDEF:.")


def is_name(text: str) -> bool:
    """Whether it is a name or an IPv4 address. A leading dash, which would make it an option of ssh, is refused."""
    return bool(text) and text[0] not in "-." and _NAME_CHARACTERS.issuperset(text)


def is_address(text: str) -> bool:
    """Whether it is an IPv6 address, which may have a zone (fe80::1%eth0)."""
    address, percent, zone = text.partition("%")
    return address.count(":") >= 2 and _ADDRESS_CHARACTERS.issuperset(address) and (not percent or is_name(zone))


def is_host(text: str) -> bool:
    """Whether it is a name or an address."""
    return is_name(text) or is_address(text)
