# SPDX-License-Identifier: Apache-2.0
"""`anyaccel port`: find what ties code to CUDA, and rewrite it for any accelerator."""

from __future__ import annotations

import contextlib
import signal
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import waiting
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.terminal import moves_cursor, terminal_width

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from anyaccel.port.config import PortConfig
    from anyaccel.port.files import Skipped

_EXAMPLES = """\
  what is there to port, and what of it can be rewritten
      anyaccel port .
      anyaccel port train.py --json | jq '.summary'
  see the changes, make them
      anyaccel port src --diff
      anyaccel port src notebooks --write
  also make the changes that need a reader
      anyaccel port src --diff --unsafe-fixes
  some rules only
      anyaccel port src --write --select ACC1,ACC201 --ignore ACC104
      anyaccel port --rules
"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "port",
        "Find what ties Python files and Jupyter notebooks to CUDA, and rewrite it for any accelerator.\n"
        "Lines with `# noqa`, `# noqa: ACC101` or `#ignore-cuda` are left. Needs LibCST; never imports torch.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="a file, or a folder that is searched for .py, .pyi and .ipynb files")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="report; exit code 1 when something is found (default)")
    how.add_argument("--diff", action="store_true", help="print the changes; exit code 1 when there are some")
    how.add_argument("--write", action="store_true", help="make the changes, and report what is left")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--select", metavar="RULE,...", help="use only these rules, or those whose codes begin so; default: all")
    add("--ignore", metavar="RULE,...", help="leave out these rules, or those whose codes begin so")
    add("--exclude", metavar="PATTERN", action="append", default=[], help="leave out files and folders of this pattern")
    add("--unsafe-fixes", action="store_true", help="also make fixes that need a reader: --rules says which, and why")
    add("--rules", action="store_true", help="list the rules with their tiers and reasons, and exit")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns 1 when --check finds something, or a file could not be read or written."""
    options = build_parser().parse_intermixed_args(argv)
    if not options.paths and not options.rules:
        raise UsageError("no PATH is given: name files or folders, such as `anyaccel port .`")
    _require_libcst()
    if options.rules:
        return _list_rules(options.json)
    with _ended_by_signals():
        return _port(options)


def _require_libcst() -> None:
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise AnyAccelError(
            f"anyaccel port needs LibCST, which cannot be imported ({error}); install it: pip install 'anyaccel[port]'"
        ) from None


def _list_rules(as_json: bool) -> int:
    from anyaccel.port.output import dumped
    from anyaccel.port.rules import RULES

    if as_json:
        rows = [{"code": each.code, "title": each.title, "tier": str(each.tier), "why": each.why} for each in RULES]
        print(dumped({"rules": rows}))
    else:
        for each in RULES:
            print(f"{each.code}  {each.tier:6}  {each.title}")
            print(
                textwrap.fill(each.why, min(terminal_width(), 100), initial_indent=" " * 16, subsequent_indent=" " * 16)
            )
    return 0


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within the context, SIGTERM ends the run as Ctrl-C does: workers end, and the file being written is completed."""

    def end(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _port(options: argparse.Namespace) -> int:
    from anyaccel.port import output, run
    from anyaccel.port.source import UnreadableError, write_bytes

    with waiting("looking for files"):
        files, skipped = _files(options)
    findings = []
    mentions: list[dict[str, Any]] = []
    problems = [f"{each.path}: not ported: {each.reason}" for each in skipped if each.failed]
    notes = [f"{each.path}: left out: {each.reason}" for each in skipped if not each.failed]
    text = not options.json
    for message in [*problems, *notes]:
        print(message, file=sys.stderr)
    totals = dict.fromkeys(("files", "without_cuda", "changed", "fixed", "unwritten", "suppressed"), 0)
    with (
        _progress(len(files)) as step,
        contextlib.closing(run.check_files(files, step)) as outcomes,
    ):
        for outcome in outcomes:
            totals["files"] += 1
            totals["without_cuda"] += not outcome.parsed
            totals["suppressed"] += outcome.suppressed
            error, fixed = outcome.error, False
            if options.write and outcome.before is not None and outcome.after is not None:
                try:
                    write_bytes(outcome.path, outcome.after, outcome.before)
                    fixed = True
                except UnreadableError as failure:
                    error = str(failure)
                    totals["unwritten"] += sum(each.fixed for each in outcome.findings)
            if error:
                problems.append(
                    output.problem(run.FileResult(outcome.path, error, line=outcome.line, column=outcome.column))
                )
                _say(problems[-1], sys.stderr)
            totals["changed"] += outcome.after is not None and (fixed or not options.write)
            totals["fixed"] += fixed and sum(each.fixed for each in outcome.findings)
            findings += [(each, fixed and each.fixed) for each in outcome.findings]
            mentions += [{"path": outcome.path, "line": line} for line in outcome.mentions]
            if text and options.diff:
                _say(output.difference(outcome), sys.stdout, end="")
            elif text:
                for each in outcome.findings:
                    if not (fixed and each.fixed):
                        _say(output.line(each), sys.stdout)
    return _conclude(options, findings, mentions, problems, totals)


def _conclude(
    options: argparse.Namespace,
    findings: list[Any],
    mentions: list[dict[str, Any]],
    problems: list[str],
    totals: dict[str, int],
) -> int:
    from anyaccel.port import output
    from anyaccel.port.rule import Tier

    left = [each for each, fixed in findings if not fixed]
    tiers = {str(tier): sum(each.tier is tier for each in left) for tier in Tier}
    totals |= {"found": len(findings), **tiers, "failed": len(problems)}
    if options.json:
        rows = [output.as_dict(each, fixed) for each, fixed in findings]
        rules = output.counts([each for each, _ in findings])
        report = {"findings": rows, "rules": rules, "mentions": mentions, "problems": problems, "summary": totals}
        print(output.dumped(report))
    else:
        print(_summary(options, totals), file=sys.stderr if options.diff else sys.stdout)
    if problems:
        return 1
    if options.write:
        return 0
    return int(totals["changed"] > 0) if options.diff else int(bool(findings))


def _summary(options: argparse.Namespace, totals: dict[str, int]) -> str:
    from anyaccel.port.output import plural

    seen = plural(totals["files"], "file")
    without = f" ({totals['without_cuda']} without a word of CUDA)" if totals["without_cuda"] else ""
    failed = f"; {plural(totals['failed'], 'path')} not ported" if totals["failed"] else ""
    unsafe = 0 if options.unsafe_fixes else totals["unsafe"]
    more = f", {unsafe} more with --unsafe-fixes" if unsafe else ""
    unwritten = f", {totals['unwritten']} could not be written" if totals["unwritten"] else ""
    if options.write:
        what = f"fixed {totals['fixed']} in {plural(totals['changed'], 'file')}{more}, {totals['report']} left to you"
    elif options.diff:
        what = f"would fix {totals['found'] - totals['report'] - unsafe} in {plural(totals['changed'], 'file')}{more}"
    elif totals["found"]:
        what = f"found {totals['found']}, {totals['found'] - totals['report'] - unsafe} fixable with --write{more}"
    else:
        what = "found nothing to port"
    return f"{what}{unwritten}; {seen}{without}{failed}"


def _files(options: argparse.Namespace) -> tuple[list[tuple[str, PortConfig]], list[Skipped]]:
    from anyaccel.port import config
    from anyaccel.port.files import Skipped, find

    files: list[tuple[str, PortConfig]] = []
    skipped: list[Skipped] = []
    seen = set()
    for path in options.paths:
        settings = config.find(path).changed(options.select, options.ignore, options.unsafe_fixes)
        for each in find([path], [*settings.exclude, *options.exclude]):
            if isinstance(each, Skipped):
                skipped.append(each)
            elif each not in seen:
                seen.add(each)
                files.append((each, settings))
    return files, skipped


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """A function to call after each of the `total` files; it draws a bar on a terminal where tqdm is installed."""
    bar: Any = None
    if moves_cursor(sys.stderr):
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # workers are forked, so there must be no thread
            bar = tqdm(desc="porting", total=total, unit="file", leave=False, file=sys.stderr, delay=0.5)
    try:
        yield (lambda: None) if bar is None else bar.update
    finally:
        if bar is not None:
            bar.close()


def _say(text: str, stream: Any, end: str = "\n") -> None:
    """Print above the progress bar, with characters escaped that the terminal cannot show."""
    if not text:
        return
    encoding = stream.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and sys.stderr.isatty():
        tqdm.write(text, file=stream, end=end)
    else:
        print(text, end=end, file=stream)
