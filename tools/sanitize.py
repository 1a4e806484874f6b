# SPDX-License-Identifier: Apache-2.0
"""Builds the native tests with GCC's or clang's sanitizers and runs them: `make sanitize`.

Each file of tests/native is linked with the sources of the ops that it names below, with the flags of the ops. Those of
the decoder (llm_*) are linked with all of csrc/llm, that of the collectives (comm) with csrc/comm; instructions that
the machine may lack are emulated there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
TESTS = ROOT / "tests/native"
sys.path.insert(0, str(ROOT / "src/anyaccel/ops"))
import in_tree  # noqa: E402

# File of tests/native, without _test.cpp -> the ops that it calls.
OPS = {"optim": ("cpu_adam", "cpu_adagrad", "cpu_lion"), "aio": ("async_io",)}
LLM = sorted(file.name.removesuffix("_test.cpp") for file in (ROOT / "tests/native").glob("llm_*_test.cpp"))
COMM = "comm"  # linked with COMMON alone
# The others have no threads of their own.
THREADED = {*OPS, COMM, "llm_attention", "llm_matrix", "llm_model", "llm_quantise", "llm_weight_file"}
SANITIZERS = {"address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "thread": ["-fsanitize=thread"]}
# Of CMakeLists.txt. Emulated instructions are written with those of avx512.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
LLM_FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Wshadow", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
# GCC 12 takes _mm512_undefined_ps for an uninitialised variable (its bug 105593).
LLM_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
LLM_X86 = ["-march=x86-64-v2", "-DANYACCEL_X86", "-DANYACCEL_EMULATE"]
COMMON = [
    "common/team.cpp",
    "common/cpu_features.cpp",
    *(f"comm/{file.name}" for file in sorted((CSRC / "comm").glob("*.cpp"))),
]
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


Step = tuple[Path, list[str]]  # a source and its flags


def op_steps(test: str) -> list[Step]:
    files = dict.fromkeys(file for op in OPS[test] for file in in_tree.sources(op))
    flags = [flag for flag in in_tree.flags() if flag not in ("-O3", "-DNDEBUG")] + ['-DANYACCEL_VARIANT="test"']
    return [(source, flags) for source in [TESTS / f"{test}_test.cpp", *(CSRC / file for file in files)]]


def llm_steps(folders: tuple[str, ...] = ("llm",)) -> list[Step]:
    x86 = platform.machine() in ("x86_64", "AMD64")
    flags = LLM_FLAGS + (LLM_X86 if x86 else [])
    steps = []
    files = [file for folder in folders for file in sorted((CSRC / folder).glob("*.cpp"))]
    for source in [*(CSRC / file for file in COMMON), *files]:
        if "kernels" not in source.name:
            steps.append((source, flags))
            continue
        line = next((line for line in source.read_text().splitlines() if line.startswith("// ISA: ")), "")
        for isa in line.removeprefix("// ISA: ").split() or ["scalar", "avx2", "avx512"]:
            if isa == "scalar" or x86:
                own = {"scalar": [], "avx2": AVX2}.get(isa, AVX512)
                steps.append((source, [*flags, *own, f"-DANYACCEL_ISA_VARIANT={isa}"]))
    return steps


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")


def is_fresh(target: Path) -> bool:
    """Whether an object of an earlier run is younger than all that it was made of."""
    try:
        made, rule = target.stat().st_mtime, target.with_suffix(".d").read_text()
        files = rule.partition(":")[2].replace("\\\n", " ").split()
        return all(Path(file).stat().st_mtime < made for file in files)
    except FileNotFoundError:
        return False


def compile_all(steps: list[Step], sanitizer: str, folder: Path, name: str) -> list[Path]:
    """Objects of the sources; those that `folder` has from an earlier run are used again."""
    more = ["-O1", "-g", "-fno-omit-frame-pointer", f"-I{CSRC}", "-MMD", *SANITIZERS[sanitizer]]
    objects, commands = [], []
    for source, flags in steps:
        command = [*compiler(), *flags, *more, "-c", str(source)]
        digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
        target = folder / f"{name}-{source.stem}-{digest}.o"
        objects.append(target)
        if not is_fresh(target):
            commands.append([*command, "-o", str(target)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    return objects


def build(test: str, sanitizer: str, folder: Path, decoder: dict[str, list[Path]]) -> Path:
    """`decoder`: objects of csrc/llm by sanitizer, compiled when they are first wanted."""
    if test in OPS:
        objects, link = compile_all(op_steps(test), sanitizer, folder, test), in_tree.LINK_FLAGS
    elif test == COMM:
        steps = llm_steps(())
        steps.append((TESTS / f"{test}_test.cpp", steps[0][1]))
        objects, link = compile_all(steps, sanitizer, folder, test), ["-pthread", "-lrt"]
    else:
        steps = llm_steps()
        if sanitizer not in decoder:
            decoder[sanitizer] = compile_all(steps, sanitizer, folder, "llm")
        own = compile_all([(TESTS / f"{test}_test.cpp", steps[0][1])], sanitizer, folder, test)
        objects, link = own + decoder[sanitizer], ["-pthread", "-lrt"]
    program = folder / f"{test}-{sanitizer}"
    command = [*compiler(), *SANITIZERS[sanitizer], *map(str, objects), *link, "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tests",
        nargs="*",
        default=[*OPS, COMM, *LLM],
        metavar="TEST",
        help=f"of {', '.join([*OPS, COMM, *LLM])}; default: all",
    )
    parser.add_argument("--sanitizer", choices=SANITIZERS, action="append", help="default: all")
    parser.add_argument("--keep", metavar="FOLDER", help="keep objects there: the next run compiles what has changed")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds a test may run (default: 600)")
    options = parser.parse_args()
    failed = 0
    decoder: dict[str, list[Path]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(options.keep or temporary).resolve())
        Path(folder).mkdir(parents=True, exist_ok=True)
        for test in options.tests:
            for sanitizer in options.sanitizer or SANITIZERS:
                if sanitizer == "thread" and test not in THREADED:
                    continue
                start = time.monotonic()
                try:
                    program = build(test, sanitizer, Path(folder), decoder)
                    environment = {**os.environ, **ENVIRONMENT}
                    subprocess.run([program], check=True, cwd=temporary, env=environment, timeout=options.limit)
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    failed += 1
                    how = f"exit code {error.returncode}" if hasattr(error, "returncode") else "too slow, see --limit"
                    print(f"{test}, {sanitizer}: failed ({how})", flush=True)
                    continue
                print(f"{test}, {sanitizer}: clean ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
