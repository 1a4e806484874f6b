# SPDX-License-Identifier: Apache-2.0
"""Looks at many files on all cores. Workers read and decide; only this process writes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from anyaccel.port import notebook, source
from anyaccel.port.config import PortConfig
from anyaccel.port.finding import Finding
from anyaccel.port.mentions import mentions
from anyaccel.port.rules import WORDS

logger = logging.getLogger(__name__)

_AHEAD = 4  # tasks that wait for each worker
_FEW = 6  # files for which starting workers takes longer than the work
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TURN_S = 0.1  # after which a signal that waits is heard


@dataclass(frozen=True)
class FileResult:
    """What came of one file.

    Attributes:
        path: as it was found.
        error: why it, or a cell of it, could not be looked at; empty when all could.
        findings: in the order of the text.
        before, after: its content, where fixes change it; else both are None.
        parsed: False when nothing in it looks like CUDA, so it was not parsed.
        suppressed: findings that a comment of the file silences.
        mentions: lines that merely name CUDA, in a variable or in a text for people; of modules only.
        line, column: of the error, where it has a place.
    """

    path: str
    error: str = ""
    findings: tuple[Finding, ...] = ()
    before: bytes | None = None
    after: bytes | None = None
    parsed: bool = True
    suppressed: int = 0
    mentions: tuple[int, ...] = ()
    line: int = 0
    column: int = 0


def check_file(path: str, config: PortConfig, own_cuda: bool = False) -> FileResult:
    """Look at one file. Never raises for what is in the file.

    Args:
        path: of a module or a notebook.
        config: which rules and tiers are applied.
        own_cuda: a class of the project defines a method `cuda` itself.
    """
    from anyaccel.port.engine import NotPythonError, port_text

    try:
        data = source.read_bytes(path)
        if not WORDS.search(data.decode("latin-1")):
            return FileResult(path, parsed=False)
        if path.endswith(".ipynb"):
            return _look_at_notebook(path, data, config, own_cuda)
        file = source.decode(data)
        removes = Path(path).name != "__init__.py"  # others may import from there what it imports
        ported = port_text(file.text, config.wants, config.unsafe, removes, own_cuda)
    except NotPythonError as error:
        line, column, reason = str(error).split(":", 2)
        return FileResult(path, error=reason.strip(), line=int(line), column=int(column))
    except source.UnreadableError as error:
        return FileResult(path, error=str(error))
    except (RecursionError, MemoryError) as error:
        return FileResult(path, error=f"too large or nested too deeply ({type(error).__name__})")
    except Exception as error:
        logger.debug("%s", path, exc_info=True)
        reason = " ".join(str(error).split())[:200]
        return FileResult(path, error=f"anyaccel port failed, please report it: {type(error).__name__}: {reason}")
    findings = tuple(
        Finding(path, f.line, f.column, f.code, f.message, f.tier, f.fixed, end_line=f.end_line)
        for f in ported.findings
    )
    named = mentions(file.text, {each.line for each in findings})
    return FileResult(path, "", findings, *_change(data, file.encode(ported.text)), True, ported.suppressed, named)


def _look_at_notebook(path: str, data: bytes, config: PortConfig, own_cuda: bool) -> FileResult:
    from anyaccel.port.engine import NotPythonError, port_text

    try:
        book = notebook.read(data.decode("utf-8"))
        ported = port_text(book.module, config.wants, config.unsafe, own_cuda=own_cuda)
    except UnicodeDecodeError as error:
        raise source.UnreadableError(f"not valid utf-8: {error.reason}") from None
    except NotPythonError as error:
        raise source.UnreadableError(str(error).split(":", 2)[2].strip()) from None
    findings = []
    for each in ported.findings:
        cell, line = book.cell_of(each.line)
        _, end = book.cell_of(each.end_line)
        findings.append(Finding(path, line, each.column, each.code, each.message, each.tier, each.fixed, cell, end))
    after = book.with_module(ported.text).encode("utf-8") if ported.text != book.module else data
    return FileResult(path, book.unread, tuple(findings), *_change(data, after), True, ported.suppressed)


def _change(before: bytes, after: bytes) -> tuple[bytes | None, bytes | None]:
    return (before, after) if before != after else (None, None)


def check_files(
    files: Sequence[tuple[str, PortConfig]], done: Callable[[], object] = lambda: None, workers: int = 0
) -> Generator[FileResult, None, None]:
    """Look at files, on as many cores as this process may use; outcomes come in the order of the files.

    Args:
        files: each with its configuration.
        done: called after each file.
        workers: 0 for as many as there are cores.
    """
    own_cuda = any(map(_defines_cuda, (path for path, _ in files)))
    workers = min(workers or len(os.sched_getaffinity(0)), len(files))
    if workers <= 1 or len(files) <= _FEW or _has_threads():
        for path, config in files:
            outcome = check_file(path, config, own_cuda)
            done()
            yield outcome
        return
    ready: dict[int, FileResult] = {}
    following = 0
    for index, outcome in _in_workers(files, own_cuda, workers):
        ready[index] = outcome
        done()
        while following in ready:
            yield ready.pop(following)
            following += 1


def _defines_cuda(path: str) -> bool:
    from anyaccel.port.engine import defines_cuda

    try:
        return defines_cuda(source.read_bytes(path).decode("latin-1"))
    except source.UnreadableError:
        return False  # look() says why


def _in_workers(
    files: Sequence[tuple[str, PortConfig]], own_cuda: bool, workers: int
) -> Iterator[tuple[int, FileResult]]:
    waiting = iter(range(len(files)))
    lost: list[int] = []
    executor = _executor(workers)
    running: dict[Future[FileResult], int] = {}
    try:
        while True:
            try:
                with _signals_later():
                    for index in itertools.islice(waiting, workers * _AHEAD - len(running)):
                        running[executor.submit(check_file, *files[index], own_cuda)] = index
                if not running:
                    break
                for future in _wait_for(running):
                    index = running.pop(future)
                    if isinstance(future.exception(), BrokenProcessPool):
                        lost.append(index)
                    else:
                        yield index, future.result()
                if lost:
                    raise BrokenProcessPool
            except BrokenProcessPool:
                lost += running.values()
                running.clear()
                _end(executor)
                executor = _executor(workers)
                for index in sorted(set(lost)):
                    yield index, _alone(*files[index], own_cuda)
                lost.clear()
    finally:
        _end(executor)


def _alone(path: str, config: PortConfig, own_cuda: bool) -> FileResult:
    """A file whose worker died, once more in a worker of its own, so that it cannot take others with it."""
    executor = _executor(1)
    try:
        with _signals_later():
            future = executor.submit(check_file, path, config, own_cuda)
        _wait_for([future])
        return future.result()
    except BrokenProcessPool:
        return FileResult(path, error="the process that looked at it died")
    finally:
        _end(executor)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Signals wait until the block ends: a handler that raises within a lock of the executor's would leave it taken,
    and its thread, which exits are waited for, would never get it. Threads that start within have them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for(futures: Iterable[Future[FileResult]]) -> set[Future[FileResult]]:
    """Those that have ended, one at least."""
    while True:
        with _signals_later():
            finished, _ = wait(futures, timeout=_TURN_S, return_when=FIRST_COMPLETED)
        if finished:
            return finished


def _has_threads() -> bool:
    """Whether forking is unsafe here: so it is in a notebook or a test, but not in the command."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def _executor(workers: int) -> ProcessPoolExecutor:
    import anyaccel.port.engine  # noqa: F401 - forked workers have it then

    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker)


def _start_worker() -> None:
    """Workers leave Ctrl-C to their parent, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    gc.set_threshold(300_000, 20, 50)  # a tree of a file is a million objects that live as long as it does
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end(executor: ProcessPoolExecutor) -> None:
    """End the workers now, whatever they do."""
    with _signals_later():
        processes = list((executor._processes or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        executor.shutdown(wait=True)
