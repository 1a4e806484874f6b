# SPDX-License-Identifier: Apache-2.0
"""What pages say of this repository: how it is installed, its files, decisions, extras and classes of errors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import generators
import pages
import set_address
from anyaccel import errors
from anyaccel.extras import EXTRA_OF, pip_line
from generators import map as map_picture
from generators import snippets, support

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
    if page.name != "CHANGELOG.md"
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_page_installs_anyaccel_from_an_index() -> None:
    """It is on none; `pip install 'anyaccel[llm]'` stands in messages, where anyaccel is installed already."""
    wrong = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            told = re.match(r"\s*(?:- run: |\$ )pip install (.*)", line)
            if told and re.search(r"(?:^|\s)[\"']?anyaccel\b", told[1].partition("#")[0]):
                wrong.append(f"{page.relative_to(ROOT)}:{number}: {line}")
    assert wrong == []


def test_files_that_pages_name_are_there() -> None:
    wrong = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for name in re.findall(r"`((?:benchmarks|tools|tests|examples|deploy|docs)/[\w./-]+)`", text):
            if "NAME" not in name and not (ROOT / name).exists():
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    # What a reader makes on these pages.
    assert [each for each in wrong if not re.match(r"docs/(add-|setup/|porting|deepspeed-examples)", each)] == []


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = sorted(int(page.name[:4]) for page in (ROOT / "docs" / "adr").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_error_derives_from_ours() -> None:
    """But for what never leaves the part that raises it: its name says so, or it is listed here."""
    inside = {"ClientGoneError", "ApiError", "UnreadableError", "NotPythonError", "ConformanceError", "UncheckedError"}
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    others = []
    for path in sorted((ROOT / "src" / "anyaccel").rglob("*.py")):
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if not bases & known and not node.name.startswith("_") and node.name not in inside:
                    others.append((path, node.name, bases))
                known.add(node.name)
    assert others == []


def test_messages_name_extras_that_bring_the_package() -> None:
    extras = PROJECT["optional-dependencies"]

    def brings(extra: str) -> set[str]:
        found = set()
        for requirement in extras[extra]:
            own = re.fullmatch(r"anyaccel\[(.*)\]", requirement)
            for inner in own[1].split(",") if own else ():
                found |= brings(inner)
            found.add(re.split(r"[\[<>=~]", requirement)[0])
        return found

    assert PROJECT["dependencies"] == []
    assert {package for package, extra in EXTRA_OF.items() if package not in brings(extra)} == set()
    assert pip_line("torch") == "pip install 'anyaccel[torch]'"
    assert pip_line("matplotlib") == "pip install matplotlib"


def test_the_page_about_installing_has_every_extra() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert set(table) == PROJECT["optional-dependencies"].keys() - {"dev", "docs"}


# Imports of these fail; then each piece of code runs, and the first line of its error is printed.
_WITHOUT = """
import sys
hidden = set(sys.argv[1].split(","))


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
for code in sys.argv[2:]:
    try:
        exec(code)
        print("works")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_without_torch_what_needs_it_says_which_extra_to_install() -> None:
    codes = {
        "import anyaccel; anyaccel.topology, anyaccel.launch": "works",
        "import anyaccel; anyaccel.get_accelerator()": "AcceleratorUnavailableError: torch is not installed",
        "import anyaccel; anyaccel.init_inference": "MissingPackageError: anyaccel.inference.init_inference needs",
        "import anyaccel; anyaccel.init_distributed": "MissingPackageError: ",
        "import anyaccel; anyaccel.io.load": "MissingPackageError: anyaccel.io.load needs torch, which is not",
        "from anyaccel.ops.adam import CPUAdam": "MissingPackageError: ",
        "from anyaccel.ops.aio import aio_handle": "MissingPackageError: ",
    }
    hidden = ",".join(["torch", "numpy", "transformers"])
    command = [sys.executable, "-c", _WITHOUT, hidden, *codes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    said = done.stdout.splitlines()
    assert [line[: len(start)] for line, start in zip(said, codes.values(), strict=True)] == list(codes.values())
    assert all("pip install 'anyaccel[torch]'" in line for line in said if line != "works")


def test_the_support_matrix_is_current_and_has_tests_behind_it() -> None:
    from anyaccel.vendors import VENDORS

    data = support.data()
    assert {name for name in data["devices"] if not name.startswith("cpu, ")} == VENDORS.keys() - {"cpu"}
    recorded = {file.stem for file in (ROOT / "tests" / "data" / "vendor_api").glob("*.json")}
    for device, known in data["devices"].items():
        assert list(known) == data["features"]
        for feature, word in known.items():
            assert word in data["statuses"]
            # What is tested names its test; a test on the hardware is one on a CPU, as no other machine runs the tests.
            if word in ("hardware", "emulation", "recorded", "imitated", "torch"):
                assert (ROOT / data["evidence"][feature][word]).is_file(), (device, feature)
            assert word != "hardware" or device.startswith("cpu, x86-64")
            # Kunlunxin's devices show the functions of torch.cuda.
            assert word != "recorded" or device in recorded | {"klxpu"}, device


def test_each_cell_of_the_table_of_instruction_sets_has_a_test() -> None:
    table = support.data()["instruction_sets"]
    makefile = (ROOT / "Makefile").read_text()
    assert list(table["tested"]) == [*support.isa_rows(), *support.OTHER_MACHINES]
    assert set(table["tested"].values()) < set(table["words"])
    # Every file with kernels is in a row, and every row has tests that name each instruction set of its kernels.
    sources = {file for part in table["parts"].values() for file in ROOT.glob(part["sources"])}
    assert sources == {
        *(ROOT / "csrc" / "llm").glob("*/kernels_*.cpp"),
        *(ROOT / "csrc" / "comm").glob("*_kernels.cpp"),
        *(ROOT / "csrc" / "optim").glob("*_kernels.cpp"),
    }
    native = ROOT / "tests" / "native"
    cross = makefile[makefile.index("\ntest-cross:") :].partition("\n\n")[0]
    for name, part in table["parts"].items():
        named: set[str] = set()
        for test in part["tests"]:
            text = (native / f"{test}_test.cpp").read_text()
            for included in re.findall(r'#include "(llm_\w+\.h)"', text):
                text += (native / included).read_text()
            named |= {isa for pair in re.findall(r'\bIsa::(\w+)|"(\w+)"', text) for isa in pair}
            if "for (const anyaccel::IsaRow& row : anyaccel::kIsaRows)" in text:
                named |= set(support.isa_rows())
        assert support.variants(part["sources"]) <= named, name
        if support.cell(part, "s390x") == "portable":
            assert re.search(rf"test_cross.sh s390x '[\w|]*\b{part['tests'][0]}\b", cross), name
    # What is emulated is: on a processor of qemu's, or as plain code where few processors have it.
    arm64 = re.search(r"^ARM64 := (.*)$", makefile, re.MULTILINE)
    assert arm64 is not None and arm64[1].split()[:3] == ["cortex-a72", "neoverse-n1", "max,sve-max-vq=2"]
    assert all(f"test_cross.sh {machine} " in cross for machine in support.OTHER_MACHINES)
    cmake = (ROOT / "CMakeLists.txt").read_text()
    for isa, word in table["tested"].items():
        if word == "by hand":
            assert f"set({isa}_flags" in cmake.partition("if(ANYACCEL_EMULATE)")[2].partition("endif()")[0], isa
    assert "big-endian" in (native / "llm_matrix_test.cpp").read_text()


def test_generated_pages_are_current() -> None:
    """But for `backends`, which takes long: tests/unit/accelerator/test_vendor_contract.py has made it anyway."""
    names = set(pages.NAMES) - {"backends"}
    command = [sys.executable, ROOT / "tools" / "pages.py", "--check", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_are_written_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generators, "ROOT", tmp_path)
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    monkeypatch.setattr(snippets, "DOCS", tmp_path / "docs")
    (tmp_path / "code.py").write_text("a = 1\nif a:\n    # [part]\n    b = 2\n    # [/part]\n")
    page = tmp_path / "page.md"
    page.write_text("<!-- include: code.py#part -->\n```python\nold\n```\n")
    assert pages.main(["snippets", "--check"]) == 1
    assert pages.main(["snippets"]) == 0
    assert page.read_text() == "<!-- include: code.py#part -->\n```python\nb = 2\n```\n"
    assert pages.main(["snippets", "--check"]) == 0
    said = capsys.readouterr().out
    assert said == "page.md is out of date: python tools/pages.py snippets\npage.md is written\n"
    for wrong in ("<!-- include: code.py#none -->\n```\n```\n", "<!-- include: none.py -->\n```\n```\n"):
        with pytest.raises(ValueError, match="none"):
            snippets.expand(wrong)
    with pytest.raises(ValueError, match="1 includes"):
        snippets.expand("<!-- include: code.py#part -->\nno block\n")
    with pytest.raises(ValueError, match="no part is marked as generated"):
        generators.fill("# generated by tools/pages.py: models\n", "vendors", [])


def test_the_address_of_the_repository_goes_everywhere() -> None:
    address = "https://forge.example/owner/anyaccel"
    put = set_address.with_address
    readme = put("README.md", (ROOT / "README.md").read_text(), address)
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert [link for link in links if not link.startswith((f"{address}/", "https://", "#"))] == []
    assert f"]({address}/blob/main/docs/install.md)" in readme
    assert f"]({address}/raw/main/docs/pictures/topo.svg)" in readme
    project = (ROOT / "pyproject.toml").read_text()
    for _ in range(2):  # again, when it moves
        project = put("pyproject.toml", project, address)
    assert tomllib.loads(project)["project"]["urls"]["Issues"] == f"{address}/issues"
    assert project.count("[project.scripts]") == 1
    assert f"- repo: {address}\n" in put("docs/porting.md", (ROOT / "docs" / "porting.md").read_text(), address)
    assert put("CITATION.cff", (ROOT / "CITATION.cff").read_text(), address).endswith(f"\nrepository-code: {address}\n")


def test_the_picture_of_generate_has_the_lines_that_are_printed() -> None:
    from anyaccel.vendors import FIRST_AVAILABLE

    shown = (ROOT / "docs" / "pictures" / "generate.svg").read_text()
    assert f">accelerator: cpu, {FIRST_AVAILABLE}<" in shown
    assert ">  left-over cores: none<" in shown


def test_no_page_speaks_of_how_the_work_is_divided() -> None:
    pages = [*PAGES, ROOT / "benchmarks" / "README.md"]
    told = re.compile(r"\b(another|other|this) issue\b|\bissue's\b|in vain")
    assert {page.name: told.findall(page.read_text()) for page in pages if told.search(page.read_text())} == {}


def test_the_map_is_drawn_with_every_package() -> None:
    drawn = {part.strip() for _, parts in map_picture.LAYERS for part in parts}
    assert {each.name for each in (ROOT / "src" / "anyaccel").iterdir() if (each / "__init__.py").exists()} <= drawn
    assert {each.name for each in (ROOT / "csrc").iterdir() if each.is_dir()} <= drawn


def test_the_speed_that_the_readme_tells_is_that_of_the_measurements() -> None:
    said = re.search(r"decodes ([\d.]+) to ([\d.]+) times as fast", (ROOT / "README.md").read_text())
    assert said is not None
    table = (ROOT / "docs" / "performance.md").read_text().split("| ours / peer |")[1].split("\n\n")[0]
    times = [float(row.split("|")[2].split("(")[1].rstrip(") ")) for row in table.splitlines()[2:]]
    assert (float(said[1]), float(said[2])) == (min(times), max(times))


def test_the_pages_count_the_ops_that_there_are() -> None:
    from anyaccel.ops.builders.cpu import ops

    count = len(set(ops.__all__))
    (told,) = re.findall(r"\d+ of (\d+) load", (ROOT / "docs" / "conformance.md").read_text())
    listed = re.findall(r"^\w+ +\w+Builder ", (ROOT / "docs" / "ops.md").read_text(), re.MULTILINE)
    assert (int(told), len(listed)) == (count, count)
