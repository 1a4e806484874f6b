# SPDX-License-Identifier: Apache-2.0
"""Names and addresses of hosts."""

import signal
import socket
import subprocess
import sys
import threading

import pytest

from anyaccel.launch.cluster.address import are_this_host, is_this_host, own_addresses


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


SILENT = """
import os, signal, socket, sys, time
from anyaccel.launch.cluster.address import are_this_host

def answer(*_, **__):  # a name server that does not
    os.write(1, b"asked\\n")
    time.sleep(1000)

socket.getaddrinfo = answer
are_this_host(["one", "two"])
"""


def test_an_interrupt_does_not_wait_for_a_name_server():
    with subprocess.Popen([sys.executable, "-c", SILENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert [asking.stdout.readline() for _ in range(2)] == [b"asked\n"] * 2
        asking.send_signal(signal.SIGINT)
        _, errors = asking.communicate(timeout=60)
    assert asking.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors


@pytest.mark.parametrize("name", ["x" * 64 + ".example", "a..b", "."])
def test_what_can_be_no_name_of_a_host_is_not_this_one(name):
    assert are_this_host([name, "localhost"]) == [False, True]
    assert are_this_host([name, f"{name}.{name}"]) == [False, False]
