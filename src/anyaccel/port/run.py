# SPDX-License-Identifier: Apache-2.0
"""Looks at many files on all cores. Workers read and decide; only this process writes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from anyaccel.port import notebook, source, tables
from anyaccel.port.company import place, waiting
from anyaccel.port.config import Config
from anyaccel.port.config import find as find_config
from anyaccel.port.files import beside
from anyaccel.port.finding import Finding
from anyaccel.port.mentions import mentions
from anyaccel.port.project import NO_PROJECT, Outline, Project, join, outline

logger = logging.getLogger(__name__)

_AHEAD = 4  # tasks that wait for each worker
_FEW = 6  # files for which starting workers takes longer than the work


@dataclass(frozen=True)
class Outcome:
    """What came of one file.

    Attributes:
        path: as it was found.
        error: why it could not be looked at; empty when it could.
        findings: in the order of the text.
        before, after: its content, where fixes change it; else both are None.
        parsed: False when nothing in it looks like CUDA, so it was not parsed.
        suppressed: findings that a comment of the file silences.
        mentions: lines that merely name CUDA, in a variable or in a text for people; of modules only.
        line, column: of the error, where it has a place.
        asks: a question stays whether something is on CUDA.
        holds: a place that stays, for which what works together with it waits.
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
    asks: bool = False
    holds: str = ""


def look(path: str, config: Config, project: Project = NO_PROJECT) -> Outcome:
    """Look at one file. Never raises for what is in the file."""
    try:
        data = source.read_bytes(path)
        if not tables.WORDS.search(data.decode("latin-1")):
            return Outcome(path, parsed=False)
        if path.endswith(".ipynb"):
            return _look_at_notebook(path, data, config, project)
        return _look_at_module(path, data, config, project)
    except source.UnreadableError as error:
        return Outcome(path, error=str(error), holds=_unknown(path))
    except (RecursionError, MemoryError) as error:
        return Outcome(path, holds=_unknown(path), error=f"too large or nested too deeply ({type(error).__name__})")
    except Exception as error:
        logger.debug("%s", path, exc_info=True)
        told = " ".join(str(error).split())[:200]
        return Outcome(path, error=f"anyaccel port failed, please report it: {type(error).__name__}: {told}")


def _unknown(path: str) -> str:
    """What files that work together with one that cannot be parsed wait for."""
    return f"{Path(path).name}, which cannot be read and may ask for CUDA"


def _look_at_module(path: str, data: bytes, config: Config, project: Project) -> Outcome:
    from anyaccel.port.engine import NotPythonError, port_text

    file = source.decode(data)
    try:
        removes = Path(path).name != "__init__.py"
        ported = port_text(file.text, config.wants, removes, project, config.partial, project.held.get(path, ""))
    except NotPythonError as error:
        line, column, reason = str(error).split(":", 2)
        return Outcome(path, error=reason.strip(), line=int(line), column=int(column), holds=_unknown(path))
    findings = tuple(
        Finding(path, f.line, f.column, f.code, f.message, f.fixable, end_line=f.end_line, waits=f.waits)
        for f in ported.findings
    )
    after = file.encode(ported.text)
    changed = after != data
    named = mentions(file.text, {each.line for each in findings})
    before, new = (data, after) if changed else (None, None)
    holds = place(path, ported.holder.line, ported.holder.code) if ported.holder is not None else ""
    return Outcome(path, "", findings, before, new, True, ported.suppressed, named, asks=ported.asks, holds=holds)


def _look_at_notebook(path: str, data: bytes, config: Config, project: Project) -> Outcome:
    from anyaccel.port.engine import NotPythonError, port_text

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise source.UnreadableError(f"not valid utf-8: {error.reason}") from None
    book = notebook.read(text)
    try:
        ported = port_text(
            book.module, config.wants, project=project, partial=config.partial, held=project.held.get(path, "")
        )
    except NotPythonError as error:
        raise source.UnreadableError(str(error).split(":", 2)[2].strip()) from None
    findings = []
    for each in ported.findings:
        cell, line = book.cell_of(each.line)
        _, end = book.cell_of(each.end_line)
        findings.append(Finding(path, line, each.column, each.code, each.message, each.fixable, cell, end, each.waits))
    after = book.with_module(ported.text).encode("utf-8") if ported.text != book.module else data
    changed = after != data
    before, new = (data, after) if changed else (None, None)
    holds = ""
    if ported.holder is not None:
        cell, line = book.cell_of(ported.holder.line)
        holds = place(f"{path} cell {cell}", line, ported.holder.code)
    return Outcome(path, "", tuple(findings), before, new, True, ported.suppressed, asks=ported.asks, holds=holds)


def look_at_all(
    files: Sequence[tuple[str, Config]],
    done: Callable[[], object] = lambda: None,
    workers: int = 0,
    read: Callable[[], object] = lambda: None,
) -> Generator[Outcome, None, None]:
    """Look at files, on as many cores as this process may use; outcomes come in the order of the files.

    Args:
        files: each with its configuration.
        done: called after each file.
        workers: 0 for as many as there are cores.
        read: called after each file that was read before that: these files, and the others of their packages.
    """

    def outline_of(path: str) -> Outline:
        found = _outline(path)
        read()
        return found

    outlines = [outline_of(path) for path, _ in files]
    others = beside([path for path, _ in files])
    around = [outline_of(path) for path in others]
    project = join([*outlines, *around], (os.path.realpath(path) for path in (*(path for path, _ in files), *others)))
    project = replace(project, asking=any(each.facts.asks for each in around))
    # What asks whether something is on CUDA comes first: where that stays, devices that other code gets stay, in all
    # files.
    asking = [index for index, each in enumerate(outlines) if each.facts.asks and not project.asking]
    ready = {}
    for index, outcome in _look_at(files, asking, project, workers):
        ready[index] = outcome
        done()
    if any(outcome.asks for outcome in ready.values()):
        project = replace(project, asking=True)
        ready = {index: outcome for index, outcome in ready.items() if outcome.asks}  # in those nothing else changes
    for index, outcome in _look_at(files, [each for each in range(len(files)) if each not in ready], project, workers):
        ready[index] = outcome
        if index not in asking:
            done()
    links = {
        path: each.links
        for path, each in zip((*(path for path, _ in files), *others), (*outlines, *around), strict=True)
    }
    found = [(each.path, each) for each in ready.values()]
    holds = {path: each.holds for path, each in found}
    changed = [path for path, each in found if each.before is not None]
    held = waiting(links, holds, changed, lambda path: look(path, find_config(path), project).holds)
    again = [index for index, (path, config) in enumerate(files) if path in held and not config.partial]
    for index, outcome in _look_at(files, again, replace(project, held=held), workers):
        ready[index] = outcome
    for index in range(len(files)):
        yield ready.pop(index)


def _look_at(
    files: Sequence[tuple[str, Config]], wanted: Sequence[int], project: Project, workers: int
) -> Generator[tuple[int, Outcome], None, None]:
    """Look at the files with these indices, in the order in which they get done."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(wanted))
    if workers <= 1 or len(wanted) <= _FEW or _has_threads():
        for index in wanted:
            yield index, look(*files[index], project)
        return
    for number, outcome in _in_workers([files[index] for index in wanted], project, workers):
        yield wanted[number], outcome


def _outline(path: str) -> Outline:
    """What a file says to the others; nothing where it cannot be read, which look() tells."""
    try:
        text = source.read_bytes(path).decode("utf-8", "replace")
        if path.endswith(".ipynb"):
            book = notebook.read(text)
            found = outline(book.module)
            return replace(found, links=found.links.with_programs(book.commands))
        return outline(text) if path.endswith((".py", ".pyi")) else Outline()
    except (source.UnreadableError, RecursionError, MemoryError):
        return Outline()


def _in_workers(files: Sequence[tuple[str, Config]], project: Project, workers: int) -> Iterator[tuple[int, Outcome]]:
    waiting = iter(range(len(files)))
    lost: list[int] = []
    executor = _executor(workers)
    running: dict[Future[Outcome], int] = {}
    try:
        while True:
            try:
                for index in itertools.islice(waiting, workers * _AHEAD - len(running)):
                    running[executor.submit(look, *files[index], project)] = index
                if not running:
                    break
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
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
                executor.shutdown(wait=True, cancel_futures=True)
                executor = _executor(workers)
                for index in sorted(set(lost)):
                    yield index, _alone(*files[index], project)
                lost.clear()
    finally:
        _end(executor)


def _alone(path: str, config: Config, project: Project) -> Outcome:
    """A file whose worker died, once more in a worker of its own, so that it cannot take others with it."""
    executor = _executor(1)
    try:
        return executor.submit(look, path, config, project).result()
    except BrokenProcessPool:
        return Outcome(path, error="the process that looked at it died")
    finally:
        _end(executor)


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
    gc.set_threshold(300_000, 20, 50)  # a tree of a file is a million objects that live as long as it does
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end(executor: ProcessPoolExecutor) -> None:
    """End the workers now, whatever they do."""
    processes = list((executor._processes or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    executor.shutdown(wait=True)
