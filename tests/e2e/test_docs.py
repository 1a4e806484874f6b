# SPDX-License-Identifier: Apache-2.0
"""The documentation: the site builds without a warning, links lead somewhere, commands do what the pages say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import doc_commands as commands

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted([REPOSITORY / "README.md", *DOCS.rglob("*.md")])
_NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as forges and Sphinx make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=_NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in _anchors(place)):
            broken.append(target)
    assert broken == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=_NAMES)
def test_commands_do_what_the_page_says(page: Path) -> None:
    wrong = commands.run_page(page)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=_NAMES)
def test_slow_commands_do_what_the_page_says(page: Path) -> None:
    wrong = commands.run_page(page, slow=True)
    assert not wrong, "\n".join(wrong)


_COMMAND = re.compile(r"^(?:\$ |(?:anyaccel [a-z]+|make|pip|python) [ -~]*$)", re.MULTILINE)
# Their commands take a model of some GB, or all of the machine; their options are checked below.
_OF_MEASUREMENTS = ("inference.md", "performance.md")


@pytest.mark.parametrize("page", PAGES, ids=_NAMES)
def test_every_command_is_run_or_says_why_not(page: Path) -> None:
    wrong = []
    for block in commands.blocks(page.read_text(encoding="utf-8")):
        if block.language == "console":
            problem = commands.problem_of_mark(block)
            if not list(block.commands()):
                problem = "a console block without a command"
        elif block.language in ("sh", "bash", "shell"):
            problem = "" if block.kind == "not run" else "commands belong into a console block, behind `$ `"
        elif block.language == "" and page.name not in _OF_MEASUREMENTS and _COMMAND.search(block.body):
            problem = "a block of commands is a console block, with `$ ` before each"
        else:
            problem = ""
        if problem:
            wrong.append(f"line {block.line}: {problem}")
    assert wrong == []


_OPTIONS = json.loads((REPOSITORY / "tests" / "data" / "cli_options.json").read_text())


@pytest.mark.parametrize("page", PAGES, ids=_NAMES)
def test_options_shown_exist(page: Path) -> None:
    """In all commands shown, also in those that are not run, wherever they stand in a block."""
    wrong = []
    for block in commands.blocks(page.read_text(encoding="utf-8")):
        if block.language not in ("", "console"):
            continue
        for line in block.body.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\$ )?(?:\S+=\S* )*anyaccel ([a-z]+)(?: (.*))?$", line)
            if match is None:
                continue
            name, rest = match[1], (match[2] or "").split("  #")[0]
            if name not in _OPTIONS:
                wrong.append(f"line {block.line}: there is no command {name!r}")
                continue
            own = rest.split(" -- ")[0]
            if name == "run":  # what comes after the script is the script's
                own = re.split(r"\s(?:\S+\.py|-m \S+)\b", own)[0]
            known = {option.replace("_", "-") for option in _OPTIONS[name]}
            for option in re.findall(r"(?:^|\s)(--[a-z][\w-]*)", own):
                if option.replace("_", "-") not in known:
                    wrong.append(f"line {block.line}: anyaccel {name} has no {option}")
    assert wrong == []


_AT_THE_TOP = [REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "SECURITY.md"]
# Options of other programs, which pages name in a sentence.
_FOREIGN = """
    --address --build-arg --cap-add --cpus --cpus-per-task --cpuset-cpus --http-host --num-cpus --shm-size
    --stop-timeout --gpus --fork --pid --map-by --kill-on-bad-exit --no-deps --ntasks-per-node --version
    --nproc-per-node --nnodes --rdzv-endpoint --standalone --log-dir --numa-binding --num-processes --use-cpu
    --num-cpu-threads-per-process --ninstances --enable-tcmalloc --enable-jemalloc --skip-cross-node-cores
    --ncores-per-instance --enable-elastic-training --autotuning --signal --amp
    --lora-dim --zero-stage --offload --moe
"""


@pytest.mark.parametrize("page", [*PAGES, *_AT_THE_TOP], ids=[*_NAMES, *(page.name for page in _AT_THE_TOP)])
def test_options_named_in_sentences_exist(page: Path) -> None:
    known = {option.replace("_", "-") for options in _OPTIONS.values() for option in options} | set(_FOREIGN.split())
    folders = ("benchmarks", "examples", "tools")
    for script in (file for folder in folders for file in REPOSITORY.glob(f"{folder}/*.py")):
        known |= set(re.findall(r'add_argument\(\s*"(--[a-z][\w-]*)"', script.read_text(encoding="utf-8")))
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = {
        option.replace("_", "-")
        for code in re.findall(r"`([^`\n]+)`", text)
        for option in re.findall(r"(?:^|[\s(])(--[a-z][\w-]*)", code)
    }
    assert named - known == set()


def test_every_class_of_error_is_in_troubleshooting() -> None:
    """With the classes of Python that it is one of too, by which programs catch it."""
    from anyaccel import errors

    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? *\| (\d+) \|", text, re.MULTILINE)
    public = {each.__name__: each for each in vars(errors).values() if isinstance(each, type)}
    assert {name for name, _, _ in told} == public.keys()
    for name, also, code in told:
        assert int(code) == public[name].exit_code, name
        assert not also or also in {each.__name__ for each in public[name].__mro__}, name


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        (["took 3.1 s"], "took 12 s\n", ""),
        (["a", "b"], "b\na\n", "b"),
        (["x … z"], "x and y z\n", ""),
        (["...", "b"], "a\nb\n", ""),
        (["a"], "b\n", "a"),
    ],
)
def test_how_output_is_compared(shown: list[str], printed: str, missing: str) -> None:
    assert commands.compare(shown, printed) == missing


def test_what_the_runner_notices(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.txt -->\n```text\nhello\n```\n\n```console\n$ cat a.txt\nhello\n$ echo one\ntwo\n$ false\n```\n"
        "<!-- run: exit 3 -->\n```console\n$ exit 3\n```\n<!-- not run: hardware -->\n```console\n$ exit 9\n```\n"
    )
    wrong = commands.run_page(page)
    assert [each.split("\n")[0] for each in wrong] == ["page.md:6: $ echo one", "page.md:6: $ false"]
    bad = commands.Block(1, "console", "$ x\n", "not run", "because")
    assert "neither of hardware" in commands.problem_of_mark(bad)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'anyaccel[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*command, str(DOCS), str(tmp_path / "site")], text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        if "_build" not in page.parts:
            assert f'href="{page.relative_to(DOCS).with_suffix(".html").as_posix()}"' in index or page.stem == "index"
    # The search puts a title that is the word itself first, and else a page with the word in its title.
    found = json.loads((tmp_path / "site" / "searchindex.js").read_text().partition("(")[2].rpartition(")")[0])
    titles = dict(zip(found["docnames"], found["titles"], strict=True))
    assert (titles["memory"], titles["install"]) == ("Memory", "Install")
    assert [name for name, title in titles.items() if "slurm" in title.lower()] == ["slurm"]
