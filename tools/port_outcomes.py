#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs public programs that name CUDA in five ways on this machine, and compares what they compute.

    python tools/port_outcomes.py                          all programs, fetched from GitHub into .cache/port_outcomes
    python tools/port_outcomes.py nanogpt dcgan --ways as-cuda
    python tools/port_outcomes.py --checkouts DIR --python PYTHON --json results.json --markdown PAGE

The ways: as-is; by-hand (the device changed by hand, which the others are compared with); write (`anyaccel port
--write`); unsafe (with --unsafe-fixes too); as-cuda (`python -m anyaccel.cuda`, the program unmodified). `again` is
by-hand once more: it shows which programs do not repeat their own numbers.

tools/port_programs/programs.toml lists the programs and says how they were chosen; its folder has what stands in for
their data sets. Each way runs in a fresh copy, with fixed seeds and a deadline. What is compared are the losses that a
program differentiates, the outputs of its modules, or numbers that it prints. The exit code is 1 when a way that was
asked for, other than as-is, does not give the numbers of the hand-made program.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tools" / "port_programs"
WAYS = ("as-is", "by-hand", "write", "unsafe", "as-cuda")
SAME, WRONG, FAILED, LATE = "same", "wrong", "failed", "timeout"
RELATIVE, ABSOLUTE = 1e-5, 1e-6  # what two runs of the same arithmetic may differ by

INTRODUCTION = """
# Public programs for CUDA, run on a CPU

Programs of well-known repositories, each in a copy of its own: as it is; with the device changed by hand, which the
others are compared with; after `anyaccel port --write`, and with `--unsafe-fixes` too ([porting](porting.md)); and
unmodified with [`python -m anyaccel.cuda`](as-cuda.md). `same` has ended with the losses or outputs of the hand-made
version (to 1e-5), `wrong` with other ones; `failed` ended with an error. Which programs, how they were chosen and what
was made small in them says `tools/port_programs/programs.toml`; `tools/port_outcomes.py` runs them.
""".lstrip()

Changes = dict[str, list[list[str | int]]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the list; programs.toml says what each field is."""

    name: str
    kind: str
    repository: str
    commit: str
    run: str
    demands: bool = True
    folder: str = "."
    paths: tuple[str, ...] = ()
    data: str = ""
    absent: tuple[str, ...] = ()
    small: Changes = dataclasses.field(default_factory=dict)
    hand: Changes = dataclasses.field(default_factory=dict)
    numbers: str = "losses"
    devices: int = 1
    as_cuda: str = ""
    deadline: float = 300.0


@dataclasses.dataclass(frozen=True)
class Result:
    """How a program ended in one way: the numbers it gave, or why there are none."""

    outcome: str
    note: str = ""
    numbers: tuple[float, ...] = ()
    seconds: float = 0.0


NOT_RUN = Result("not run")


def read_programs(path: Path) -> list[Program]:
    """The list; each name once, and the hand-made changes where CUDA is demanded."""
    listed = tomllib.loads(path.read_text())
    programs = []
    for entry in listed["program"]:
        for name in ("paths", "absent"):
            entry[name] = tuple(entry.get(name, ()))
        name, kind, source = entry.pop("about").split(", ")
        programs.append(Program(name, kind, source, listed["commits"][source], **entry))
    names = [program.name for program in programs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SystemExit(f"{path}: listed twice: {', '.join(twice)}")
    idle = [program.name for program in programs if program.demands and not program.hand]
    if idle:
        raise SystemExit(f"{path}: demand CUDA, and have no change by hand: {', '.join(idle)}")
    return programs


def change(folder: Path, changes: Changes) -> None:
    """Replace texts in files: each as often as the list says, once where it says nothing.

    Raises:
        SystemExit: a text occurs more or less often, so that the list is of another commit.
    """
    for name, replacements in changes.items():
        path = folder / name
        text = path.read_text()
        for old, new, *count in replacements:
            wanted, found = (count or [1])[0], text.count(str(old))
            if found != wanted:
                raise SystemExit(f"{path}: {old!r} occurs {found} times, not {wanted}")
            text = text.replace(str(old), str(new))
        path.write_text(text)


def repository(program: Program, checkouts: Path | None) -> Path:
    """The git directory that has the program: of a mirror, or cloned once from GitHub."""
    name = program.repository.replace("/", "+")
    if checkouts is not None:
        mirror = checkouts / name / "repo"
        return mirror / ".git" if (mirror / ".git").exists() else mirror
    place = ROOT / ".cache" / "port_outcomes" / f"{name}.git"
    if not place.exists():
        url = f"https://github.com/{program.repository}"
        subprocess.run(["git", "clone", "-q", "--bare", url, str(place)], check=True, timeout=900)
    return place


def extract(git: Path, commit: str, paths: Iterable[str], into: Path) -> None:
    """Write the files of a commit; large ones that a mirror lacks are left out."""
    command = ["git", "--git-dir", str(git)]
    tree = subprocess.run([*command, "ls-tree", "-rz", commit, *paths], capture_output=True, check=True).stdout
    files = []
    for line in tree.decode().split("\0")[:-1]:
        about, name = line.split("\t", 1)
        mode, kind, blob = about.split()
        if kind == "blob" and mode != "120000":  # links are of data sets
            files.append((blob, name))
    wanted = "".join(f"{blob}\n" for blob, _ in files).encode()
    stored = subprocess.run([*command, "cat-file", "--batch"], input=wanted, capture_output=True, check=True).stdout
    at = 0
    for _, name in files:
        end = stored.index(b"\n", at)
        about_blob, at = stored[at:end].split(), end + 1
        if about_blob[1] == b"missing":
            continue
        size = int(about_blob[2])
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored[at : at + size])
        at += size + 1


def environment(program: Program, copy: Path) -> dict[str, str]:
    """What a program is run with: the stand-ins first, one thread, nothing of the user's home."""
    settings = {
        "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(program.devices), "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
        "HOME": str(copy / ".home"), "MPLCONFIGDIR": str(copy.parent / "matplotlib"),
        "PYTHONPATH": os.pathsep.join(str(place) for place in (FOLDER, copy, copy / program.folder)),
        "PORT_NUMBERS": str(copy / ".numbers"), "PORT_KIND": program.numbers, "PORT_ABSENT": " ".join(program.absent),
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ANYACCEL_", "PYTHON"))}
    return {**inherited, **settings}


def within(seconds: float, command: Sequence[str], folder: Path, settings: dict[str, str]) -> tuple[int | None, str]:
    """The exit code of a command, None past its deadline, and all that it printed; what it started is ended with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=settings, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read()


def first_error(output: str) -> str:
    """The line that names the error: the last of a traceback, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?([\w.]*\.)?\w*(Error|Exception)\b", line)]
    # The first of several: those behind it are of who waited for the process that failed, as the two named here.
    causes = [line for line in errors if "ProcessRaisedException" not in line and "ChildFailedError" not in line]
    return (causes or errors or lines[-1:] or ["no output"])[0][:160]


def numbers_of(program: Program, copy: Path, output: str) -> tuple[float, ...]:
    """What is compared. Several processes write in any order, so that theirs are sorted."""
    if program.numbers in ("losses", "outputs"):
        recorded = copy / ".numbers"
        lines = [line.split() for line in recorded.read_text().splitlines()] if recorded.exists() else []
        if len({process for process, _ in lines}) > 1:
            return tuple(sorted(float(value) for _, value in lines))
        return tuple(float(value) for _, value in lines)
    return tuple(float(value) for value in re.findall(program.numbers, output))


def compare(result: Result, reference: Result) -> Result:
    """The result judged by the hand-made program's."""
    if result.outcome != SAME or reference.outcome != SAME:
        return result
    ours, theirs = result.numbers, reference.numbers
    if len(ours) != len(theirs):
        return dataclasses.replace(result, outcome=WRONG, note=f"{len(ours)} numbers instead of {len(theirs)}")
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        both_nan = math.isnan(one) and math.isnan(other)
        if not both_nan and not math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            note = f"number {place} of {len(ours)} is {one:.7g}, by hand {other:.7g}"
            return dataclasses.replace(result, outcome=WRONG, note=note)
    return result


def port_options(python: str, way: str) -> list[str]:
    """The options of `anyaccel port` for this way."""
    if way == "write":
        return ["--write"]
    shown = subprocess.run([python, "-m", "anyaccel", "port", "--help"], capture_output=True, text=True, check=True)
    return ["--write", "--unsafe-fixes" if "--unsafe-fixes" in shown.stdout else "--partial"]


def run(program: Program, way: str, git: Path, python: str, place: Path) -> Result:
    """One program in one way, in a copy of its own."""
    copy = place / program.name / way
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    extract(git, program.commit, program.paths, copy)
    change(copy, program.small)
    settings = environment(program, copy)
    (copy / ".home").mkdir()
    if program.data:
        maker = [python, "-c", f"import samples\n{program.data}"]
        code, output = within(300, maker, copy / program.folder, settings)
        if code != 0:
            raise SystemExit(f"{program.name}: its data cannot be made: {first_error(output)}")
        (copy / ".numbers").unlink(missing_ok=True)
    if way in ("by-hand", "again"):
        change(copy, program.hand)
    if way in ("write", "unsafe"):
        command = [python, "-m", "anyaccel", "port", *port_options(python, way), "."]
        code, output = within(300, command, copy, settings)
        (copy / ".port").write_text(output)
        errors = re.findall(r"^anyaccel: (?:.*: )?error: .*", output, re.MULTILINE)
        if code not in (0, 1) or errors:  # 1 also where places are left
            return Result(FAILED, (errors or [f"anyaccel port: {first_error(output)}"])[0][:160])
    mode = ["-m", "anyaccel.cuda", *shlex.split(program.as_cuda)] if way == "as-cuda" else []
    command = [python, *mode, *shlex.split(program.run)]
    start = time.monotonic()
    code, output = within(program.deadline, command, copy / program.folder, settings)
    seconds = round(time.monotonic() - start, 1)
    (copy / ".output").write_text(output)
    if code is None:
        return Result(LATE, f"after {program.deadline:.0f} s", seconds=seconds)
    if code != 0:
        return Result(FAILED, first_error(output), seconds=seconds)
    numbers = numbers_of(program, copy, output)
    if not numbers:
        return Result(WRONG, "ended without a number", seconds=seconds)
    return Result(SAME, "", numbers, seconds)


def summary(programs: Sequence[Program], table: dict[str, dict[str, Result]], ways: Sequence[str]) -> list[list[str]]:
    """A row for the programs that demand CUDA, and one for those that run on a CPU as they are: how many, by way."""
    rows = []
    for demands, title in ((True, "demand CUDA"), (False, "run on a CPU as they are")):
        of_kind = [p.name for p in programs if p.demands == demands and p.name in table]
        if not of_kind:
            continue
        counts = [sum(table[name].get(way, NOT_RUN).outcome == SAME for name in of_kind) for way in ways]
        rows.append([f"{len(of_kind)} {title}", *(f"{count} ({100 * count / len(of_kind):.0f} %)" for count in counts)])
    return rows


def markdown(programs: Sequence[Program], table: dict[str, dict[str, Result]], ways: Sequence[str], about: str) -> str:
    """The page: how many, then each program, then why one did not do what the hand-made one does."""
    lines = [INTRODUCTION, f"Run on {about}", ""]
    lines += [f"| programs that | {' | '.join(ways)} |", f"|---{'|---' * len(ways)}|"]
    lines += [f"| {' | '.join(row)} |" for row in summary(programs, table, ways)]
    lines += ["", f"| program | kind | {' | '.join(ways)} |", f"|---|---{'|---' * len(ways)}|"]
    notes = []
    for program in programs:
        if program.name not in table:
            continue
        results = [table[program.name].get(way, NOT_RUN) for way in ways]
        link = f"[{program.name}](https://github.com/{program.repository}/tree/{program.commit})"
        lines.append(f"| {link} | {program.kind} | {' | '.join(result.outcome for result in results)} |")
        for way, result in zip(ways, results, strict=True):
            if result.note and way != "as-is":
                notes.append(f"- {program.name}, {way}: `{result.note.replace('`', chr(39))}`")
    return "\n".join([*lines, *(["", "## What did not", "", *notes] if notes else [])]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs, or kinds of them; default: all")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--programs", type=Path, default=FOLDER / "programs.toml", help="the list")
    parser.add_argument("--checkouts", type=Path, help="mirrors of the repositories: DIR/owner+name/repo")
    parser.add_argument("--python", default=sys.executable, help="the Python that has what the programs need")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "port_outcomes" / "work", help="the copies")
    parser.add_argument("--json", type=Path, help="add the results to those of this file")
    parser.add_argument("--markdown", type=Path, help="write them as a page here, with what --json has")
    options = parser.parse_args(argv)
    ways = [way for way in options.ways.split(",") if way]
    unknown = [way for way in ways if way not in (*WAYS, "again")]
    if unknown:
        parser.error(f"--ways: {', '.join(unknown)}: choose from {', '.join((*WAYS, 'again'))}")
    programs = read_programs(options.programs)
    known = {name for program in programs for name in (program.name, program.kind)}
    missing = [name for name in options.names if name not in known]
    if missing:
        parser.error(f"not in the list: {', '.join(missing)}")
    chosen = [p for p in programs if not options.names or {p.name, p.kind} & set(options.names)]

    table: dict[str, dict[str, Result]] = {}
    if options.json and options.json.exists():
        stored = json.loads(options.json.read_text())["programs"]
        table = {name: {way: Result(**cell) for way, cell in row.items()} for name, row in stored.items()}
    torch = subprocess.run(
        [options.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    about = f"{date.today().isoformat()} with torch {torch}, Python {platform.python_version()}, {processor()}."
    ran: dict[str, dict[str, Result]] = {}
    for program in chosen:
        git = repository(program, options.checkouts)
        results = {"by-hand": run(program, "by-hand", git, options.python, options.work.absolute())}
        for way in ways:
            if way != "by-hand":
                result = run(program, way, git, options.python, options.work.absolute())
                results[way] = compare(result, results["by-hand"])
        ran[program.name] = {way: results[way] for way in ways}
        table.setdefault(program.name, {}).update(results)
        for way in dict.fromkeys(["by-hand", *ways]):
            result = results[way]
            print(f"{program.name:24} {way:8} {result.outcome:8} {result.seconds:6.1f} s  {result.note}", flush=True)
        if options.json:  # after each program: all of them take long
            cells = {name: {w: dataclasses.asdict(r) for w, r in row.items()} for name, row in table.items()}
            options.json.write_text(json.dumps({"about": about, "programs": cells}, indent=1) + "\n")
    for row in summary(chosen, ran, ways):
        print("  ".join([row[0], *(f"{way} {cell}" for way, cell in zip(ways, row[1:], strict=True))]))
    if options.markdown:
        there = [way for way in WAYS if any(way in row for row in table.values())]
        options.markdown.write_text(markdown(programs, table, there, about))
    good = all(r.outcome == SAME for row in ran.values() for way, r in row.items() if way != "as-is")
    return 0 if good else 1


def processor() -> str:
    """The name of this machine's processor."""
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
