# SPDX-License-Identifier: Apache-2.0
"""The prefix cache on disk: answers go on after a restart with the same tokens, whatever the disk has."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import serving
from anyaccel.errors import UsageError
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.disk_cache import DiskCache, model_key, page_keys
from anyaccel.serve.engine.engine import ServingEngine
from anyaccel.serve.engine.grammar import GrammarCompiler
from anyaccel.serve.engine.settings import EngineSettings

PROMPT = serving.prompt_of(random.Random(1), 6 * PAGE + 10)


@asynccontextmanager
async def server(
    folder: Path, case: str = "llama", most_bytes: int = 1 << 30, model: str = "model", cache_pages: int = 0
) -> AsyncIterator[tuple[ServingEngine, DiskCache]]:
    """An engine whose prefixes are in the folder."""
    settings = EngineSettings()
    made = serving.native(case)
    decoder = serving.decoder_of(made, settings)
    if cache_pages:
        decoder.cache_pages = cache_pages
    decoder.disk = disk = DiskCache(folder, model, decoder.page_bytes, most_bytes)
    engine = ServingEngine(lambda _: decoder, settings, GrammarCompiler("", None))
    try:
        yield engine, disk
    finally:
        await engine.close()  # writes what waits


def asked(
    folder: Path, prompts: Sequence[Sequence[int]], case: str = "llama", cache_pages: int = 0, **options: Any
) -> list[serving.Answer]:
    """The answers of a server that was started for these prompts, one after another."""

    async def run() -> list[serving.Answer]:
        async with server(folder, case, cache_pages=cache_pages, **options) as (engine, _):
            return [await serving.answer(engine, prompt, 20, logprobs_of()) for prompt in prompts]

    return asyncio.run(run())


def logprobs_of() -> serving.SamplingParams:
    return serving.SamplingParams(temperature=0.0, logprobs=2)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


@pytest.mark.parametrize("case", ["llama", "gemma2", "qwen3_moe"])
def test_a_prompt_goes_on_after_a_restart_with_the_same_bits(tmp_path: Path, case: str) -> None:
    (first,) = asked(tmp_path, [PROMPT], case)
    assert first.cached == 0 and len(files_in(tmp_path)) == (len(PROMPT) + 20) // PAGE
    longer = [*PROMPT, *first.tokens, *PROMPT[:40]]
    (again, turn) = asked(tmp_path, [PROMPT, longer], case)
    assert again.cached == 6 * PAGE
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
    assert turn.cached >= 6 * PAGE
    (alone,) = asked(tmp_path / "none", [longer], case)
    assert turn.tokens == alone.tokens


def test_only_what_the_cache_has_not_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(tmp_path, [PROMPT])
    reads: list[int] = []
    read = DiskCache.read
    monkeypatch.setattr(DiskCache, "read", lambda disk, keys: (reads.append(len(keys)), read(disk, keys))[1])
    answers = asked(tmp_path, [PROMPT, PROMPT, PROMPT[: 2 * PAGE + 1], PROMPT[::-1]])
    assert [each.cached for each in answers] == [6 * PAGE, 6 * PAGE, 2 * PAGE, 0]
    assert reads == [6]


@pytest.mark.parametrize("harm", ["changed", "cut", "empty", "gone", "other", "folder"])
def test_a_damaged_file_is_passed_over_and_written_again(tmp_path: Path, harm: str) -> None:
    (first,) = asked(tmp_path, [PROMPT])
    third = next(tmp_path.glob("*")) / page_keys(PROMPT, 3)[2]
    content = third.read_bytes()
    if harm == "changed":
        third.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif harm == "cut":
        third.write_bytes(content[:-1])
    elif harm == "empty":
        third.write_bytes(b"")
    elif harm == "gone":
        third.unlink()
    elif harm == "other":  # a good page of other tokens
        third.write_bytes((third.parent / page_keys(PROMPT, 5)[4]).read_bytes())
    else:
        third.unlink()
        third.mkdir()
    (again,) = asked(tmp_path, [PROMPT])
    assert again.cached == (0 if harm in ("gone", "folder") else 2 * PAGE)  # 2 pages alone are not worth reading
    assert again.tokens == first.tokens
    if harm != "folder":
        assert third.read_bytes() == content
        (last,) = asked(tmp_path, [PROMPT])
        assert last.cached == 6 * PAGE and last.tokens == first.tokens


def test_models_and_other_texts_have_files_of_their_own(tmp_path: Path) -> None:
    asked(tmp_path, [PROMPT])
    (other,) = asked(tmp_path, [PROMPT], model="other")
    assert other.cached == 0
    changed = [*PROMPT]
    changed[5] += 1
    assert asked(tmp_path, [changed])[0].cached == 0
    assert len(list(tmp_path.glob("*"))) == 2
    assert page_keys(PROMPT, 6)[0] != page_keys(changed, 6)[0] and page_keys(PROMPT, 6)[5] != page_keys(changed, 6)[5]


def test_the_folder_is_bounded_and_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    prompts = [serving.prompt_of(random.Random(seed), 5 * PAGE) for seed in range(4)]
    asked(tmp_path, prompts[:1])
    size = sum(file.stat().st_size for file in files_in(tmp_path))
    asked(tmp_path, prompts[1:3], most_bytes=3 * size)
    asked(tmp_path, [prompts[0]], most_bytes=3 * size)  # reads, and so uses it
    asked(tmp_path, [prompts[3]], most_bytes=3 * size)
    assert sum(file.stat().st_size for file in files_in(tmp_path)) <= 3 * size
    cached = [answer.cached > 0 for answer in asked(tmp_path, prompts, most_bytes=10 * size)]
    assert cached == [True, False, True, True]


def test_a_prompt_is_restored_only_where_there_is_room(tmp_path: Path) -> None:
    asked(tmp_path, [PROMPT])
    others = [serving.prompt_of(random.Random(seed), 5 * PAGE) for seed in range(10, 14)]
    answers = asked(tmp_path, [*others, PROMPT, *others], cache_pages=9)
    alone = asked(tmp_path / "none", [*others, PROMPT, *others])
    assert [each.tokens for each in answers] == [each.tokens for each in alone]
    assert answers[4].cached == 6 * PAGE  # the others' pages made room


def test_a_disk_that_is_full_is_said_once_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskCache, "_write_files", full)
    prompts = [serving.prompt_of(random.Random(seed), 5 * PAGE) for seed in range(3)]
    answers = asked(tmp_path, prompts)
    assert all(len(each.tokens) == 20 for each in answers) and files_in(tmp_path) == []
    said = [record for record in caplog.records if "No space left" in record.getMessage()]
    assert len(said) == 1


def test_what_a_killed_server_left_is_removed_and_a_wrong_folder_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "x.part").write_bytes(b"half")
    DiskCache(tmp_path, "model", 64, 1 << 20).close()
    assert files_in(tmp_path) == []
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="--cache-dir"):
        DiskCache(file, "model", 64, 1 << 20)
    if os.geteuid() != 0:
        (tmp_path / "model").chmod(0o500)
        with pytest.raises(UsageError, match="Permission denied"):
            DiskCache(tmp_path, "model", 64, 1 << 20)


def test_an_edited_config_is_another_model(tmp_path: Path) -> None:
    """Rotary positions, such as YaRN's, are changed there, and with them all keys."""
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    keys = set()
    for theta in (1e4, 1e6):
        (tmp_path / "config.json").write_text(f'{{"rope_theta": {theta}}}')
        keys.add(model_key(tmp_path, ModelOptions("bf16"), 4096))
    assert len(keys) == 2
