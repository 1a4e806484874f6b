# SPDX-License-Identifier: Apache-2.0
"""Names and addresses of hosts."""

import socket
import threading

import pytest

from anyaccel.launch.address import are_this_host, is_this_host, own_addresses


def test_names_of_many_hosts_are_resolved_at_the_same_time(monkeypatch):
    together = threading.Barrier(8)  # nobody gets an answer before all have asked

    def answer(name, *_, **__):
        together.wait(timeout=60)
        if name == "h3":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names = [f"h{number}" for number in range(8)]
    assert are_this_host(names) == [name == "h3" for name in names]
    assert own_addresses(names) == ["127.0.0.1"]


def test_a_name_is_asked_for_once(monkeypatch):
    asked = []

    def answer(name, *_, **__):
        asked.append(name)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert are_this_host(["a", "b", "a", "localhost", "someone@a"]) == [False, False, False, True, False]
    assert sorted(asked) == ["a", "b"]


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", socket.gethostname()])
def test_names_of_this_host(name):
    assert is_this_host(name)


@pytest.mark.parametrize("name", ["someone@localhost", "192.0.2.1", "no-such-host.invalid"])
def test_names_of_others(name):
    assert not is_this_host(name)


def test_an_own_address_is_given_when_no_host_can_be_reached():
    assert own_addresses([]) == ["127.0.0.1"]
    assert own_addresses(["no-such-host.invalid"]) == ["127.0.0.1"]
