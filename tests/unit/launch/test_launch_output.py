# SPDX-License-Identifier: Apache-2.0
"""What is said where output of the workers cannot be written: nothing that is not so."""

import os

import pytest

from anyaccel.launch.local.streams import Streams
from anyaccel.launch.output import Output, OutputOptions, cannot_write


@pytest.fixture
def full():
    with open("/dev/full", "wb", buffering=0) as file:
        output = Output(file.fileno())
        output.write(b"x\n")
        assert output.problem
        yield output


@pytest.fixture
def job(tmp_path, capfd):
    """Two workers with log files; gives the streams and the ends that they write to."""
    reader, writer = os.pipe()
    found = Streams(OutputOptions(log_dir=str(tmp_path)), Output(writer))
    ends = [found.open(rank) for rank in (0, 1)]
    yield found, ends, reader
    found.finish()
    for end in [reader, writer, *(end for pair in ends for end in pair)]:
        os.close(end)


def fill_disk_of(rank, found):
    """The log of a rank cannot be written from now on."""
    with open("/dev/full", "wb") as file:
        os.dup2(file.fileno(), found._logs[rank])


def test_logs_that_cannot_be_written_are_not_where_the_output_is(job, full):
    found, ends, _ = job

    def said():
        return cannot_write(full, logged=found.logged, every_log=found.every_log)

    assert said().endswith("; the job goes on, and its output is in the log files")
    for rank, end in ((0, "its output is in those log files that can be written"), (1, "from now on fails")):
        fill_disk_of(rank, found)
        os.write(ends[rank][0], b"line\n")
        found.drain()
        assert said().endswith(end)


def test_output_that_cannot_be_shown_is_not_said_to_be_shown(job, full):
    found, ends, reader = job
    for rank, text in (
        (0, "what it writes from here on is shown here"),
        (1, "what it writes to standard output is lost"),
    ):
        fill_disk_of(rank, found)
        if rank:
            found._output = full
        os.write(ends[rank][0], b"line\n")
        found.drain()
        assert text in os.read(reader, 1 << 16).decode()
