# SPDX-License-Identifier: Apache-2.0
"""Frames in the middle of what workers write."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.launch.cluster import channel
from anyaccel.launch.cluster.channel import ConnectionLostError, FrameReader, encode_frame, encode_line, read_line
from anyaccel.launch.failure import Failure, Report


class Heard:
    """What a reader passed on."""

    def __init__(self, word="w"):
        self.frames = []
        self.text = b""
        self.reader = FrameReader(word, lambda kind, data: self.frames.append((kind, data)), self.take)

    def take(self, text):
        self.text += text


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.dictionaries(st.text(max_size=5), st.text(max_size=20)))),
    st.integers(1, 50),
)
def test_frames_and_text_come_apart_however_the_stream_is_cut(parts, size):
    stream, frames, text = b"", [], b""
    for part in parts:
        if isinstance(part, bytes):
            stream += part
            text += part
        else:
            stream += encode_frame("w", "kind", part)
            frames.append(("kind", part))
    heard = Heard()
    for start in range(0, len(stream), size):
        heard.reader.feed(stream[start : start + size])
    heard.reader.close()
    assert heard.frames == frames
    assert heard.text == text


def test_text_that_cannot_begin_a_frame_is_passed_on_at_once():
    heard = Heard()
    heard.reader.feed(b"loss 0.5\n\0anyaccel:w")
    assert heard.text == b"loss 0.5\n"
    heard.reader.feed(b"eird")
    assert heard.text == b"loss 0.5\n\0anyaccel:weird"


@pytest.mark.parametrize(
    "stream",
    [
        encode_frame("other", "failed", {}),  # another job's word: a worker cannot speak for the agent
        encode_frame("w", "failed", {"a": 1}).replace(b"failed:", b"failed:Connection closed.\r"),
        b"\0anyaccel:w:no end of line",
    ],
)
def test_what_is_no_frame_of_ours_is_text(stream):
    heard = Heard()
    heard.reader.feed(stream)
    heard.reader.close()
    assert heard.frames == []
    assert heard.text == stream


def test_a_frame_that_never_ends_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(channel, "_LONGEST", 100)
    heard = Heard()
    stream = b"\0anyaccel:w:" + b"x" * 1000
    heard.reader.feed(stream)
    assert heard.text == stream


def test_a_report_survives_the_way():
    report = Report(Failure(3, 17, 256, 1.5, 2, ("last", "words")), 15, "17 (sleep)", "")
    heard = Heard()
    heard.reader.feed(encode_frame("w", "finished", report.encode()))
    assert Report.decode(heard.frames[0][1]) == report


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@given(st.lists(st.text(), max_size=5))
def test_arguments_of_any_kind_survive_a_line(arguments):
    read_end, write_end = os.pipe()
    try:
        data = [*arguments, os.fsdecode(b"\xff not UTF-8")]
        os.write(write_end, encode_line(data) + b"\x02")
        assert read_line(read_end, 5) == data
        assert os.read(read_end, 10) == b"\x02"  # what follows is left for the next reader
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_launcher_that_says_nothing(pipe):
    with pytest.raises(ConnectionLostError, match=r"within 0\.05 s"):
        read_line(pipe[0], 0.05)


def test_a_launcher_that_goes_away_in_the_middle(pipe):
    read_end, write_end = os.pipe()
    os.write(write_end, b'{"half":')
    os.close(write_end)
    with pytest.raises(ConnectionLostError, match="gone"):
        read_line(read_end, 5)
    os.close(read_end)
