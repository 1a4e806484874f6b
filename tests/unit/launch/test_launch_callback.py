# SPDX-License-Identifier: Apache-2.0
"""Who calls the launcher back, and who only connects."""

import os
import resource
import select
import subprocess
import sys
import time

import pytest

from anyaccel.launch.cluster import channel
from anyaccel.launch.cluster.callback import AgentListener

# Connects so often, says so, and keeps the connections until its input ends.
SILENT = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("connected", flush=True)
sys.stdin.read()
"""


def serve(reception, until, seconds=60):
    """What the loop of the launcher does with a reception."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        poller = select.poll()
        for descriptor in reception.to_read():
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(20):
            reception.read(descriptor)
        reception.drop_silent()


@pytest.fixture
def few_files():
    """A limit on open files that leaves 120."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 120, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_callers_that_say_nothing_keep_no_agent_out(few_files):
    heard = []
    reception = AgentListener(
        "word", ["localhost"], lambda connection, _reader, data: heard.append((connection, data)), 1
    )
    command = [sys.executable, "-c", SILENT, str(reception.contact.port), "500"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crowd:
        assert crowd.stdout.readline() == b"connected\n"
        with reception.contact.call() as agent:
            agent.sendall(channel.encode_frame("word", channel.HELLO, {"number": 7}))
            serve(reception, lambda: heard)
            [(connection, data)] = heard
            connection.close()
        reception.close()
        crowd.stdin.close()
    assert data == {"number": 7}
