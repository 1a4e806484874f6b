# SPDX-License-Identifier: Apache-2.0
"""Text of tokens as they come, and strings that end it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.errors import UsageError
from anyaccel.inference.text.stopping import Detokenizer, StopFilter, StopStrings


def of_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


@given(st.text(max_size=60))
def test_bytes_become_the_text_and_no_half_character_is_shown(text: str) -> None:
    detokenizer = Detokenizer(of_bytes)
    pieces = [detokenizer.add(token) for token in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.text(max_size=60), st.data())
def test_tokens_that_come_together_become_the_same_text(text: str, data: st.DataObject) -> None:
    tokens = list(text.encode())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    detokenizer = Detokenizer(of_bytes)
    pieces = [detokenizer.extend(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    assert "".join(pieces) + detokenizer.finish() == text


def test_broken_character_appears_at_the_end() -> None:
    detokenizer = Detokenizer(of_bytes)
    assert detokenizer.add(0xE2) == ""
    assert detokenizer.finish() == "\ufffd"


def test_text_depends_on_the_token_before() -> None:
    """As SentencePiece: the first word of a text loses its space."""

    def decode(tokens: list[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)

    detokenizer = Detokenizer(decode)
    assert [detokenizer.add(token) for token in (1, 2, 3)] == ["w1", " w2", " w3"]


def test_long_answers_do_not_keep_all_tokens() -> None:
    detokenizer = Detokenizer(of_bytes)
    assert "".join(detokenizer.add(97) for _ in range(5000)) == "a" * 5000
    assert len(detokenizer._tokens) < 600


@given(st.text("ab", min_size=1, max_size=4), st.text("abc", max_size=40), st.text("abc", max_size=10))
def test_search_ends_with_the_token_that_completes_a_string(stop: str, text: str, prompt: str) -> None:
    search = StopStrings([stop, "zz"], of_bytes).begin(list(prompt.encode()))
    ended = next((i for i, token in enumerate(text.encode()) if search.add(token)), None)
    # The string may begin in the prompt, but its end is in the answer.
    want = next((i for i in range(len(text)) if (prompt + text[: i + 1]).endswith(stop)), None)
    assert ended == want


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=2), st.lists(st.text("abc", max_size=5), max_size=12))
def test_filter_shows_what_is_before_the_first_string(strings: list[str], pieces: list[str]) -> None:
    shown, reader = "", StopFilter(strings)
    for piece in pieces:
        shown += reader.add(piece)
        if reader.stopped:
            break
    if not reader.stopped:
        shown += reader.finish()
    text = "".join(pieces)
    places = [text.index(string) for string in strings if string in text]
    assert reader.stopped == bool(places)
    assert shown == (text[: min(places)] if places else text) or _ended_sooner(text, strings, shown)


def _ended_sooner(text: str, strings: list[str], shown: str) -> bool:
    """A longer string that begins earlier is cut by a shorter one that is complete first."""
    return text.startswith(shown) and any(text[len(shown) :].startswith(string) for string in strings)


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_empty_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(UsageError, match="stop_strings"):
        StopStrings(strings, of_bytes)


def test_filter_tells_which_string_it_was() -> None:
    reader = StopFilter(["never", "b", "bc"])
    assert (reader.add("ab"), reader.stopped, reader.found) == ("a", True, "b")
