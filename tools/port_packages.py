#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs `anyaccel port --write` on published packages, checks what comes of it, and records it for porting-results.md.

    python tools/port_packages.py fetch DIR     downloads packages into DIR/before (pip, no dependencies)
    python tools/port_packages.py port DIR      ports copies in DIR/after, checks and records them (port_packages.json)
    python tools/port_packages.py draw DIR      prints random changes, to be judged by hand (port_precision.tsv)

docs/data/port_corpus.tsv lists the packages with their versions, in parts; --part takes some. Both records are in
docs/data. What `port` checks: files parse after as before; a second run changes nothing; every use of CUDA that `ast`
finds in what was ported has a finding in a second report or a comment that silences it, and every other name or text
with "cuda" in it is among that report's findings or mentions. With --imports also: of the modules that were changed,
those import after that imported before, with the CPU as accelerator; required packages that are not installed are stood
in for by empty modules, the same before and after.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anyaccel.port.files import find

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "data" / "port_packages.json"
SEEDS, DRAWN = (902115, 553311), 150

CORPUS = ROOT / "docs" / "data" / "port_corpus.tsv"
PARTS = ("first", "rules", "shut", "unseen", "unseen2", "unseen3")


def packages(parts: Sequence[str] = ()) -> list[tuple[str, str, tuple[str, ...]]]:
    """What pip calls each package of these parts (of all when there are none), its version, the folders to port."""
    rows = [line.split("\t") for line in CORPUS.read_text().splitlines() if not line.startswith("#")]
    return [
        (name, version, tuple(filter(None, folders.split(","))))
        for part, name, version, folders in rows
        if not parts or part in parts
    ]


# Run in a process of its own: argv is the package's folders, then modules. Prints {module: "" or what went wrong}.
IMPORTER = r"""
import contextlib, importlib, importlib.abc, importlib.machinery, importlib.metadata, io, json, sys, types, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.fsdp, torch.fx, torch.utils.data
own = sys.argv[1].split(",")
absent, unversioned = set(), set()
version_of = importlib.metadata.version
importlib.metadata.version = lambda name: "99.0" if name in unversioned else version_of(name)

class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

class Nothing(metaclass=Meta):
    def __init__(self, *args, **kwargs): pass
    def __init_subclass__(cls, **kwargs): pass
    def __call__(self, *args, **kwargs): return args[0] if len(args) == 1 and callable(args[0]) else Nothing()
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()
    def __getitem__(self, key): return Nothing()
    def __iter__(self): return iter(())
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def __or__(self, other): return Nothing
    __ror__ = __or__
    def __class_getitem__(cls, key): return cls

class Module(types.ModuleType):
    __path__ = []
    __version__ = "99.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = Meta(name, (Nothing,), {})
        setattr(self, name, value)
        return value

class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in absent else None
    def create_module(self, spec): return Module(spec.name)
    def exec_module(self, module): pass

sys.meta_path.append(StandIns())
results = {}
for name in sys.argv[2:]:
    for attempt in range(40):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                importlib.import_module(name)
            results[name] = ""
        except importlib.metadata.PackageNotFoundError as error:
            results[name] = str(error)
            if error.name and error.name not in unversioned:
                unversioned.add(error.name)
                continue
        except ModuleNotFoundError as error:
            top = (error.name or "").split(".")[0]
            results[name] = str(error)
            if top and top not in own and top not in absent and top not in sys.modules and top != "anyaccel":
                absent.add(top)
                continue
        except BaseException as error:
            results[name] = f"{type(error).__name__}: {error}"[:200]
        break
print(json.dumps({"results": results, "absent": sorted(absent)}))
"""


def fetch(folder: Path, parts: Sequence[str]) -> None:
    """Download and unpack what is not there yet."""
    before, downloads = folder / "before", folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for name, version, roots in packages(parts):
        target = before / name
        if target.exists():
            continue
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        found = _archives(downloads, name, version)
        if not found:
            subprocess.run([*pip, "-d", str(downloads), f"{name}=={version}"], check=True)
            found = _archives(downloads, name, version)
        unpacked = folder / "unpacked" / name
        if found[-1].suffix == ".whl":
            with zipfile.ZipFile(found[-1]) as wheel:
                wheel.extractall(unpacked)
        else:
            with tarfile.open(found[-1]) as archive:
                archive.extractall(unpacked, filter="data")
            [unpacked] = unpacked.iterdir()
        for root in roots or [
            each.name for each in unpacked.iterdir() if not each.name.endswith((".dist-info", ".data"))
        ]:
            if (unpacked / root).is_dir():
                shutil.copytree(unpacked / root, target / root, symlinks=True)
        for each in unpacked.glob("*.py"):
            if not roots:
                target.mkdir(exist_ok=True)
                shutil.copy(each, target)
        shutil.rmtree(folder / "unpacked" / name)
        print(f"{name} {version}: {sum(1 for _ in target.rglob('*.py'))} files", flush=True)


def _archives(downloads: Path, name: str, version: str) -> list[Path]:
    wanted = re.sub(r"[-_.]+", "-", f"{name}-{version}").lower()
    return sorted(each for each in downloads.iterdir() if re.sub(r"[-_.]+", "-", each.name).lower().startswith(wanted))


def port(folder: Path, parts: Sequence[str], only: list[str], imports: bool) -> dict[str, object]:
    """Port copies, check them; the record of all packages."""
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record = {name: row for name, row in record.items() if "unreported" in row}
    record = {name: record[name] for name, _, _ in packages() if name in record}
    for name, version, roots in packages(parts):
        if only and name not in only:
            continue
        before, after = folder / "before" / name, folder / "after" / name
        shutil.rmtree(after, ignore_errors=True)
        shutil.copytree(before, after, symlinks=True)
        report = _run(after, "--write")
        summary, rules = report["summary"], report["rules"]
        fixed = Counter(each["code"] for each in report["findings"] if each["fixed"])
        row: dict[str, object] = {"version": version}
        row |= {key: summary[key] for key in ("files", "without_cuda", "changed", "fixed", "not_fixable", "suppressed")}
        row |= {"failed": report["problems"], "fixed_by_rule": dict(sorted(fixed.items())), "found_by_rule": rules}
        row["second_run_changes"] = _run(after, "--diff")["summary"]["changed"]
        row["no_longer_parse"] = _broken(before, after)
        own = roots or tuple(each.name.removesuffix(".py") for each in before.iterdir())
        row |= {"unreported": list(_unreported(after))}
        if imports:
            row |= _imports(before, after, own)
        record[name] = row
        ordered = {each: record[each] for each, _, _ in packages() if each in record}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        print(name, {key: value for key, value in row.items() if "rule" not in key}, flush=True)
    return record


def _run(folder: Path, mode: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "anyaccel", "port", mode, "--json", "."]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _unreported(folder: Path) -> Iterator[str]:
    """Uses, names and texts of CUDA in ported files that a second report passes over."""
    report = _run(folder, "--check")
    told = {
        (each["path"].removeprefix("./"), line)
        for each in report["findings"]
        for line in range(each["line"], each["end_line"] + 1)
    }
    named = {(each["path"].removeprefix("./"), each["line"]) for each in report["mentions"]}
    failed = {each.split(":")[0].removeprefix("./") for each in report["problems"]}
    for file in sorted(Path(each) for each in find([str(folder)]) if isinstance(each, str) and each.endswith(".py")):
        path = str(file.relative_to(folder))
        try:
            text = file.read_bytes().decode("utf-8-sig")
            module = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        prose = {id(each.value) for each in ast.walk(module) if isinstance(each, ast.Expr)}
        others = {
            (alias.asname or alias.name).split(".")[0]
            for each in ast.walk(module)
            if isinstance(each, ast.Import | ast.ImportFrom)
            for alias in each.names
            if (getattr(each, "module", None) or alias.name).split(".")[0] != "torch"
        }
        for node in ast.walk(module):
            if id(node) in prose or not hasattr(node, "lineno") or path in failed:
                continue
            first, last = node.lineno, node.end_lineno or node.lineno
            near = {(path, line) for line in range(first, last + 1)}
            silenced = re.search(r"#\s*(?:noqa|ignore-cuda)", " ".join(lines[first - 1 : last]), re.IGNORECASE)
            if (_is_use(node, others) and not near & told and not silenced) or (
                _is_named(node) and not near & (told | named)
            ):
                yield f"{path}:{first}: {ast.unparse(node)[:100]}"


def _is_use(node: ast.AST, others: set[str]) -> bool:
    """Whether it does something with CUDA: torch.cuda, x.cuda, x.is_cuda, the name of a device or a variable.

    Args:
        node: of a module.
        others: what the module imports from other packages than torch; `chainer.cuda` is not torch's.
    """
    match node:
        case ast.Attribute(attr="is_cuda"):
            return isinstance(node.ctx, ast.Load)
        case ast.Attribute(attr="cuda", value=value, ctx=ast.Load()):
            return not (isinstance(value, ast.Name) and value.id in OPTIONS | others) and not isinstance(
                value, ast.Attribute
            )
        case ast.Constant(value=str(value)):
            return re.fullmatch(r"cuda(:\d+)?|(\w+:\w+,)*cuda:\w+(,\w+:\w+)*|CUDA_VISIBLE_DEVICES", value) is not None
    return False


OPTIONS = {"args", "self", "opt", "opts", "cfg", "config", "options", "params", "hparams", "flags", "FLAGS", "cls"}


def _is_named(node: ast.AST) -> bool:
    words = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
    words += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    return any(isinstance(each, str) and "cuda" in each.lower() for each in words)


def _environment(*folders: Path) -> dict[str, str]:
    paths = [*map(str, folders), str(ROOT / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}


def changed(before: Path, after: Path) -> list[Path]:
    """The files that differ, by their path in the package."""
    names = (each.relative_to(before) for each in sorted(before.rglob("*.py")) if each.is_file())
    return [name for name in names if (before / name).read_bytes() != (after / name).read_bytes()]


def _broken(before: Path, after: Path) -> list[str]:
    """Changed files that compiled before and do not now."""
    broken = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in changed(before, after):
            try:
                compile((before / name).read_bytes(), str(name), "exec")
            except SyntaxError:
                continue
            try:
                compile((after / name).read_bytes(), str(name), "exec")
            except SyntaxError:
                broken.append(str(name))
    return broken


def _imports(before: Path, after: Path, roots: tuple[str, ...]) -> dict[str, object]:
    """How many changed modules import before and after, and which import only before."""
    modules = [str(name.with_suffix("")).replace("/", ".").removesuffix(".__init__") for name in changed(before, after)]
    found, absent = [], []
    for tree in (before, after):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTER, ",".join(roots), *modules],
            env=_environment(tree), cwd=tree, capture_output=True, text=True, check=False,
        )  # fmt: skip
        try:
            told = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            raise SystemExit(f"the importer failed in {tree}: {done.stderr[-800:]}") from None
        found.append({name for name, error in told["results"].items() if not error})
        absent.append(told)
    for name, error in absent[0]["results"].items():
        if error:
            print(f"  not importable before: {name}: {error[:120]}", file=sys.stderr)
    return {
        "changed_modules": len(modules),
        "import_before": len(found[0]),
        "import_after": len(found[1]),
        "import_only_before": {name: absent[1]["results"].get(name, "") for name in sorted(found[0] - found[1])},
    }


def places(folder: Path, parts: Sequence[str]) -> list[tuple[str, int, list[str], list[str], list[str], list[str]]]:
    """Every changed place: file, line, the lines before it, the old lines, the new ones, the lines after it.

    Lines that only import get_accelerator are not counted as places.
    """
    found = []
    for package, _, _ in packages(parts):
        before, after = folder / "before" / package, folder / "after" / package
        for name in changed(before, after):
            old = (before / name).read_text(encoding="utf-8", errors="replace").split("\n")
            new = (after / name).read_text(encoding="utf-8", errors="replace").split("\n")
            for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
                ours = [line for line in new[k:m] if line.strip() and "from anyaccel import" not in line]
                if tag != "equal" and (ours or any(line.strip() for line in old[i:j])):
                    where = f"{package}/{name}"
                    found.append((where, i + 1, old[max(0, i - 12) : i], old[i:j], new[k:m], old[j : j + 10]))
    return found


def draw(folder: Path, parts: Sequence[str], seeds: Sequence[int]) -> None:
    """Print random samples of the changed places, one a seed; each is drawn among what those before it left."""
    found = sorted(places(folder, parts))
    left = list(found)
    for seed in seeds:
        sample = sorted(random.Random(seed).sample(left, DRAWN))
        left = [each for each in left if each not in sample]
        print(f"{len(found)} places; {DRAWN} of them, seed {seed}")
        for number, (name, line, above, old, new, below) in enumerate(sample, start=1):
            print(f"== {number}\t{name}\t{line}")
            for mark, lines in ((" ", above), ("-", old), ("+", new), (" ", below)):
                print(textwrap.indent("\n".join(each[:150] for each in lines), f"{mark} ", lambda text: True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fetch", "port", "draw"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*", help="for port: these packages; default: all")
    parser.add_argument("--part", action="append", default=[], choices=PARTS, help="default: all")
    parser.add_argument(
        "--imports", action="store_true", help="for port: import the changed modules as well, in minutes"
    )
    parser.add_argument("--seed", action="append", type=int, help="for draw: of a sample; default: those of the record")
    options = parser.parse_args()
    if options.what == "fetch":
        fetch(options.folder, options.part)
    elif options.what == "port":
        port(options.folder, options.part, options.only, options.imports)
    else:
        draw(options.folder, options.part, options.seed or SEEDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
