# SPDX-License-Identifier: Apache-2.0
"""Hostfiles, and what --include, --exclude and --num_nodes leave of them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.errors import UsageError
from anyaccel.launch import small_file
from anyaccel.launch.cluster.environment import forwarded_environment
from anyaccel.launch.cluster.hostfile import parse_hostfile, read_hostfile, select_hosts
from anyaccel.launch.job import Host

HOSTS = {"worker-0": 4, "worker-1": 4, "alice@worker-2": 2, "fd00::1": 2}


def test_hosts_in_their_order_with_comments_blanks_and_addresses():
    text = (
        "\n# the cluster\r\n"
        "worker-1   slots=4 # two sockets\n"
        "\tworker-0.example.org slots=2 max_slots=8\n"
        "alice@10.0.0.7 slots=1\n"
        "[fd00::2] slots=3\n"
        "fe80::1%eth0 slots=1 max-slots=1\n"
        "   \n"
    )
    assert list(parse_hostfile(text, "hosts").items()) == [
        ("worker-1", 4),
        ("worker-0.example.org", 2),
        ("alice@10.0.0.7", 1),
        ("fd00::2", 3),
        ("fe80::1%eth0", 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts: no host in this hostfile; write one host a line, such as: worker-0 slots=4"),
        ("# only\n\n", "hosts: no host in this hostfile"),
        ("a slots=1\nb\n", "hosts:2: host 'b' has no number of slots; write: b slots=1"),
        ("a slots=1\n\na slots=2\n", "hosts:3: host 'a' is in line 1 already; give each host once"),
        ("a slots=1\nbob@A slots=2\n", "hosts:2: host 'bob@A' is in line 1 already"),
        ("a slots=0", "hosts:1: 'slots=0': the number of slots must be 1 to"),
        ("a slots=two", "hosts:1: 'slots=two': the number of slots"),
        ("a slots=-1", "hosts:1: 'slots=-1': the number of slots"),
        ("a slots=99999999", "hosts:1: 'slots=99999999': the number of slots"),
        ("a slots=²", "hosts:1: 'slots=²'"),
        ("a slots = 4", "hosts:1: 'slots' is not understood"),
        ("a slot=4", "hosts:1: 'slot=4' is not understood; write one host a line"),
        ("a slots=1 slots=2", "hosts:1: slots= is given twice"),
        ("a slots=2 max_slots=1", "hosts:1: max_slots=1 is below slots=2"),
        ("a:4", "hosts:1: 'a:4' is the syntax of another launcher; write: a slots=4"),
        ("bob@a:4", "write: bob@a slots=4"),
        ("-oProxyCommand=x slots=1", "hosts:1: '-oProxyCommand=x' is not the name of a host"),
        ("a;b slots=1", "hosts:1: 'a;b' is not the name of a host"),
        ("b$b@a slots=1", "'b$b' in 'b$b@a' is not a user name"),
        ("@a slots=1", "is not a user name"),
        ("node[1-4] slots=1", "is not the name of a host"),
    ],
)
def test_a_mistake_names_the_line_and_what_to_write(text, message):
    with pytest.raises(UsageError) as caught:
        parse_hostfile(text, "hosts")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reads_a_file_with_a_byte_order_mark_and_a_comment_in_any_encoding(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2 # b\xfcro\n")
    assert read_hostfile(str(path)) == {"a": 2}


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"hostfile '.*/none' cannot be read: No such file or directory; check --host"):
        read_hostfile(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="Is a directory"):
        read_hostfile(str(tmp_path))


def selected(**options):
    return {host.name: host.slots for host in select_hosts(HOSTS, **options)}


EVERYTHING = {host: tuple(range(count)) for host, count in HOSTS.items()}


def test_everything_without_options():
    assert select_hosts({"b": 1, "a": 2}) == (Host("b", (0,)), Host("a", (0, 1)))


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("worker-1", {"worker-1": (0, 1, 2, 3)}),
        ("worker-1:0,2@worker-0", {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ("worker-0:3,1,1", {"worker-0": (1, 3)}),
        ("worker-0:1-3", {"worker-0": (1, 2, 3)}),
        ("worker-0:0@worker-0:2", {"worker-0": (0, 2)}),
        ("worker-2:1", {"alice@worker-2": (1,)}),
        ("alice@worker-2:1@worker-1:0", {"worker-1": (0,), "alice@worker-2": (1,)}),
        ("worker-1@alice@worker-2", {"worker-1": (0, 1, 2, 3), "alice@worker-2": (0, 1)}),
        ("fd00::1", {"fd00::1": (0, 1)}),
        ("[fd00::1]:1@worker-0:0", {"worker-0": (0,), "fd00::1": (1,)}),
        ("fd00::1:1", {"fd00::1": (1,)}),
    ],
)
def test_include(include, expected):
    assert selected(include=include) == expected


def test_exclude():
    assert selected(exclude="worker-1@worker-0:0,2") == {
        "worker-0": (1, 3),
        "alice@worker-2": (0, 1),
        "fd00::1": (0, 1),
    }
    assert "worker-0" not in selected(exclude="worker-0:0-3")


def test_the_first_hosts_of_what_is_selected():
    assert list(selected(num_nodes=2)) == ["worker-0", "worker-1"]
    assert list(selected(num_nodes=2, exclude="worker-0")) == ["worker-1", "alice@worker-2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "--include and --exclude contradict each other"),
        ({"include": "worker-9:0"}, "host 'worker-9' is not in the hostfile, which has worker-0, worker-1, alice@"),
        ({"include": "worker-0@@worker-1"}, "a host is missing"),
        ({"include": "worker-0@"}, "a host is missing"),
        ({"exclude": "worker-0:4"}, "--exclude 'worker-0:4': host worker-0 has no slot 4; it has slots 0 to 3"),
        ({"include": "worker-0:"}, "'' is not a slot number; write slots as 0,2 or 0-3"),
        ({"include": "worker-0:x"}, "'x' is not a slot number"),
        ({"include": "worker-0:-1"}, "'-1' is not a slot number"),
        ({"include": "worker-0:3-1"}, "'3-1' is no range; write it as 1-3"),
        ({"exclude": "worker-0@worker-1@worker-2@fd00::1"}, "leaves no slot of any host"),
        ({"num_nodes": 5}, "--num_nodes is 5, but there are 4 hosts: worker-0, worker-1, alice@worker-2, fd00::1"),
        ({"num_nodes": 0}, "--num_nodes is 0, it must be at least 1"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UsageError) as caught:
        selected(**options)
    assert message in str(caught.value)


names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
pools = st.dictionaries(names, st.integers(1, 8), min_size=1, max_size=6)


@given(pools)
def test_a_written_hostfile_is_read_as_it_was(pool):
    text = "".join(f"{host} slots={slots}\n" for host, slots in pool.items())
    assert list(parse_hostfile(text, "f").items()) == list(pool.items())


@given(pools, st.data())
def test_include_and_exclude_divide_the_slots_between_them(pool, draw):
    everything = [(host, slot) for host, count in pool.items() for slot in range(count)]
    some = draw.draw(st.lists(st.sampled_from(everything), min_size=1, unique=True))
    text = "@".join(f"{host}:{slot}" for host, slot in some)
    chosen = [(host.name, slot) for host in select_hosts(pool, include=text) for slot in host.slots]
    assert chosen == [pair for pair in everything if pair in some]
    if len(some) < len(everything):
        left = [(host.name, slot) for host in select_hosts(pool, exclude=text) for slot in host.slots]
        assert left == [pair for pair in everything if pair not in some]


@given(st.text(max_size=60), st.text(max_size=30))
def test_any_text_is_a_hostfile_or_one_line_of_an_error(text, selection):
    for attempt in (
        lambda: parse_hostfile(text, "f"),
        lambda: select_hosts(HOSTS, include=selection),
        lambda: select_hosts(HOSTS, exclude=selection),
    ):
        try:
            attempt()
        except UsageError as error:
            assert "\n" not in str(error)


def test_a_hostfile_may_come_through_a_pipe(tmp_path):
    read_end, write_end = os.pipe()
    os.write(write_end, "\ufeffnode1 slots=2\r\n# é\nnode2 slots=1\n".encode())
    os.close(write_end)
    try:
        assert read_hostfile(f"/dev/fd/{read_end}") == {"node1": 2, "node2": 1}
    finally:
        os.close(read_end)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fifo", "is a pipe that nobody writes to; give a file"),
        ("open fifo", "did not finish within 0.1 s; give a file"),
        ("folder", "Is a directory"),
        ("endless", "has more than 4 MiB; give a text file"),
        ("closed", "Permission denied"),
    ],
)
@pytest.mark.parametrize("what", ["hostfile", "environment file"])
def test_what_is_no_file_is_said_at_once(tmp_path, monkeypatch, kind, message, what):
    monkeypatch.setattr(small_file, "_PIPE_S", 0.1)
    monkeypatch.setattr(small_file, "_WRITER_S", 0.1)
    path = tmp_path / (".anyaccel_env" if what == "environment file" else "hosts")
    writer = None
    if "fifo" in kind:
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR) if "open" in kind else None
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        path.touch(0)
    try:
        with pytest.raises(UsageError, match=f"{what} '{path}' cannot be read: (it )?{message}"):
            if what == "hostfile":
                read_hostfile(str(path))
            else:
                forwarded_environment({}, folders=[str(tmp_path)])
    finally:
        if writer is not None:
            os.close(writer)
