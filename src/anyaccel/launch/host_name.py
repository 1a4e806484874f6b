# SPDX-License-Identifier: Apache-2.0
"""What may be the name or the address of a host, before anybody is asked for it."""

from __future__ import annotations

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_ADDRESS_CHARACTERS = frozenset("0123456789abcdefABCDEF:.")


def is_name(text: str) -> bool:
    """A name, or an IPv4 address. A leading dash would make it an option of ssh."""
    return bool(text) and text[0] not in "-." and _NAME_CHARACTERS.issuperset(text)


def is_address(text: str) -> bool:
    """An IPv6 address, with its zone perhaps (fe80::1%eth0)."""
    address, percent, zone = text.partition("%")
    return address.count(":") >= 2 and _ADDRESS_CHARACTERS.issuperset(address) and (not percent or is_name(zone))


def is_host(text: str) -> bool:
    """Either of them."""
    return is_name(text) or is_address(text)
