# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/support.md: what works on which device, on which machines, and which kernels there are.

The first is from docs/data/support.json; what benchmarks/device_all.py ran on which device from its own records in
docs/data/devices; the machines' from what `make test-machines` wrote. How each instruction set is
tested is from the former too; which kernels there are is from the rows of csrc/simd/isa.h and the lines `// ISA:` of
the kernels' files, which CMake compiles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from generators import DOCS, ROOT, fill

PAGE = DOCS / "support.md"
TRAINING = DOCS / "data" / "deepspeed.json"
DEVICES = DOCS / "data" / "devices"
RESULTS = ROOT / "tests" / "machines" / "results.json"
# Machines that have no row of their own in isa.h, where what is portable runs; models of big-endian ones are refused.
OTHER_MACHINES = ("riscv64", "ppc64le", "s390x")


def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "support.json").read_text())
    return found


def devices() -> Iterator[str]:
    table = data()
    features = table["features"]
    yield f"| device | {' | '.join(features)} |"
    yield "| --- |" + " --- |" * len(features)
    for device, known in table["devices"].items():
        name = device if " " in device else f"`{device}`"
        yield f"| {name} | {' | '.join(known[feature] for feature in features)} |"
    yield ""
    yield "| word | what it says | tests |"
    yield "| --- | --- | --- |"
    for word, meaning in table["statuses"].items():
        tests = dict.fromkeys(found[word] for found in table["evidence"].values() if word in found)
        yield f"| {word} | {meaning} | {', '.join(f'`{test}`' for test in tests)} |"


@cache
def isa_rows() -> dict[str, tuple[str, str]]:
    """What has a variant for each instruction set, and which it builds on, as in csrc/simd/isa.h."""
    header = (ROOT / "csrc" / "simd" / "isa.h").read_text()
    found = re.findall(r"^  ROW\((\w+), \w+, (\w+), (\w+),", header, re.MULTILINE)
    return {name: (kernels, basis) for name, kernels, basis in found}


def variants(sources: str) -> set[str]:
    """The instruction sets that one of the kernels' files is compiled for."""
    files = sorted(ROOT.glob(sources))
    assert files, sources
    made: set[str] = set()
    for file in files:
        text = file.read_text()
        line = re.search(r"^// ISA: (.*)$", text, re.MULTILINE)
        if "ANYACCEL_EACH_ISA" in text:
            names = {name for name, (kernels, _) in isa_rows().items() if kernels == "kernels_and_ops"}
        else:
            names = set(line[1].split() if line else ["every"])
            if "every" in names:
                names |= {name for name, (kernels, _) in isa_rows().items() if kernels != "some_kernels"}
        made |= names - {"every"}
    return made


def cell(part: dict[str, Any], column: str) -> str:
    """Whose kernels of a part run on an instruction set or one of the other machines."""
    if column in OTHER_MACHINES:
        return "refused" if column == "s390x" and part["sources"].startswith("csrc/llm/") else "portable"
    made, isa = variants(part["sources"]), column
    while isa not in made:
        isa = isa_rows()[isa][1]
    return "own" if isa == column else isa


def instruction_sets() -> Iterator[str]:
    table = data()["instruction_sets"]
    columns = [*isa_rows(), *OTHER_MACHINES]
    yield f"| | {' | '.join(columns)} | tests |"
    yield "| --- |" + " --- |" * (len(columns) + 1)
    for name, part in table["parts"].items():
        tests = ", ".join(f"`{test}`" for test in part["tests"])
        yield f"| {name} | {' | '.join(cell(part, column) for column in columns)} | {tests} |"
    yield f"| **tested by** | {' | '.join(table['tested'][column] for column in columns)} | |"
    yield ""
    yield "| word | what it says |"
    yield "| --- | --- |"
    for word, meaning in table["words"].items():
        yield f"| {word} | {meaning} |"


def machines() -> Iterator[str]:
    """What the last run of `make test-machines` found, as it wrote it: a row for each case, a column for each shape."""
    results: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(RESULTS.read_text())
    shapes = list(dict.fromkeys(shape for cases in results.values() for run in cases.values() for shape in run))
    yield f"| case | {' | '.join(shapes)} |"
    yield "| --- |" + " --- |" * len(shapes)
    for cases in results.values():
        for name, run in cases.items():
            if run:
                case = name.removeprefix("test_").replace("_", " ")
                yield f"| {case} | {' | '.join(outcome(run.get(shape, {})) for shape in shapes)} |"


def runs() -> Iterator[str]:
    """What benchmarks/device_all.py has run: a row for each device whose record is there."""
    yield "| device | conformance | tests/gpu | speed | server | programs for CUDA | machine |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for record in sorted(DEVICES.glob("*.jsonl")):
        told = [json.loads(line) for line in record.read_text().splitlines()]
        stages = {each["stage"]: each for each in told if "stage" in each}
        yield f"| {' | '.join(run(stages, [each for each in told if 'contender' in each]))} |"


def run(stages: dict[str, dict[str, Any]], speeds: list[dict[str, Any]]) -> Iterator[str]:
    """The cells of a device; empty where the script was cut off before a stage."""
    yield f"`{stages['machine']['device']}`"
    yield ", ".join(f"{count} {word}" for word, count in stages.get("conformance", {}).items() if word != "stage")
    yield stages.get("tests/gpu", {}).get("said", "").partition(" in ")[0]
    forms: dict[str, list[str]] = {}
    for each in speeds:
        if each["contender"].startswith("device ") and each["batch"] == 1:
            forms.setdefault(each["size"], []).append(each["contender"].removeprefix("device "))
    yield "; ".join(f"{size}: {', '.join(dict.fromkeys(of))}" for size, of in forms.items())
    serve = stages.get("serve")
    yield "" if serve is None else f"{serve['clients']} clients, {serve['failed']} failed"
    ported = stages.get("ported")
    yield "" if ported is None else "same output" if ported["same"] else "**other output**"
    yield stages["machine"]["machine"]


def deepspeed() -> Iterator[str]:
    """What tools/deepspeed_matrix.py found: a row for each setting, a column for each number of ranks."""
    results = json.loads(TRAINING.read_text())
    settings = results["settings"].values()
    columns = sorted({ranks for setting in settings for ranks in setting["ranks"]}, key=int)
    yield f"DeepSpeed {results['versions']['deepspeed']}, torch {results['versions']['torch']}:"
    yield ""
    yield f"| setting | {' | '.join('1 rank' if ranks == '1' else f'{ranks} ranks' for ranks in columns)} |"
    yield "| --- |" + " --- |" * len(columns)
    for setting in settings:
        cells = (training(setting["ranks"].get(ranks, {}), setting["limit"]) for ranks in columns)
        yield f"| {setting['says']} | {' | '.join(cells)} |"


def training(found: dict[str, Any], limit: float) -> str:
    """A cell: the largest relative difference of a loss; what is not within the limit is set in bold."""
    if "ours" in found:
        return f"**{found['ours']}**"
    if "theirs" in found:
        return f"trains; DeepSpeed's own does not: {found['theirs']}"
    if "difference" not in found:
        return ""
    difference = found["difference"]
    text = f"{difference:.0e}" if difference else "same bits"
    return text if difference <= limit else f"**{text}**"


def outcome(counts: dict[str, int]) -> str:
    """How a case ended on a machine: the number of variants that passed, and of others if there are any."""
    others = [f"{count} {word}" for word, count in counts.items() if word != "passed"]
    return ", ".join([*([str(counts["passed"])] if "passed" in counts else []), *others])


def files() -> dict[Path, str]:
    text = fill(PAGE.read_text(), "devices", ["", *devices(), ""])
    text = fill(text, "device runs", ["", *runs(), ""])
    text = fill(text, "machines", ["", *machines(), ""])
    text = fill(text, "deepspeed", ["", *deepspeed(), ""])
    return {PAGE: fill(text, "instruction sets", ["", *instruction_sets(), ""])}
