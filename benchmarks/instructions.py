#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Instructions that one layer of SmolLM2-135M executes on arm64, ours beside llama.cpp's, counted with qemu 7.2.

    make test-arm64 TEST=isa          # compiles the decoder for arm64
    python benchmarks/instructions.py --llama-cpp ~/llama.cpp
    python benchmarks/instructions.py --sve             # of one loop with NEON and with SVE

llama.cpp's sources may be those in the sdist of llama-cpp-python. Time is not measured. Programs
(native/instructions_*.cpp) do the same work on one thread and print the result of the last token; a count is the
difference of two runs, one of which applies the layer once more than the other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "benchmarks" / "native"
WORK = ROOT / "build" / "cross" / "instructions"
GXX = ["aarch64-linux-gnu-g++", "-std=c++20", "-O2", f"-I{NATIVE}"]
# What ANYACCEL_ISA is: the flags of llama.cpp.
VARIANTS = {"neon_dot": "armv8.2-a+dotprod+fp16", "neon_bf16_i8mm": "armv8.2-a+dotprod+fp16+bf16+i8mm"}


def build_plugin() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    plugin = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(WORK / "plugin.so"), str(NATIVE / "instructions_plugin.c")]
    subprocess.run(plugin, check=True)


def build(llama_cpp: Path) -> dict[str, tuple[Path, Path]]:
    """Of each variant, our program and ggml's."""
    build_plugin()
    cross, ours = ROOT / "build" / "cross" / "aarch64", WORK / "ours"
    libraries = [str(cross / "libanyaccel_llm.a"), str(cross / "libanyaccel_core.a"), "-lpthread"]
    command = [*GXX, f"-I{ROOT / 'csrc'}", str(NATIVE / "instructions_ours.cpp"), *libraries, "-o", str(ours)]
    subprocess.run(command, check=True)
    programs = {}
    for variant, flags in VARIANTS.items():
        folder, program = WORK / f"ggml-{variant}", WORK / f"ggml_{variant}"
        options = {
            "CMAKE_BUILD_TYPE": "Release", "CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64",
            "CMAKE_C_COMPILER": "aarch64-linux-gnu-gcc", "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
            "GGML_NATIVE": "OFF", "GGML_OPENMP": "OFF", "GGML_LLAMAFILE": "ON", "BUILD_SHARED_LIBS": "OFF",
            "GGML_CPU_ARM_ARCH": flags, "GGML_BUILD_TESTS": "OFF", "GGML_BUILD_EXAMPLES": "OFF",
        }  # fmt: skip
        source = llama_cpp / "ggml"
        (source / "ggml.pc.in").touch()  # an sdist leaves it out, and cmake wants it
        defined = [f"-D{name}={value}" for name, value in options.items()]
        subprocess.run(["cmake", "-S", str(source), "-B", str(folder), "-G", "Ninja", *defined], check=True)
        subprocess.run(["cmake", "--build", str(folder), "--target", "ggml", "ggml-cpu", "ggml-base"], check=True)
        archives = [str(folder / "src" / f"lib{name}.a") for name in ("ggml", "ggml-cpu", "ggml-base")]
        command = [*GXX, f"-I{source / 'include'}", str(NATIVE / "instructions_ggml.cpp"), *archives]
        subprocess.run([*command, "-lpthread", "-ldl", "-o", str(program)], check=True)
        programs[variant] = (ours, program)
    return programs


def count(program: Path, variant: str, *arguments: str, processor: str = "max") -> int:
    """Instructions of one application of the layer."""
    counts = []
    for times in ("1", "2"):
        with tempfile.NamedTemporaryFile() as file:
            plugin = f"{WORK / 'plugin.so'},out={file.name}"
            command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-plugin", plugin, str(program)]
            environ = {**os.environ, "ANYACCEL_ISA": variant, "QEMU_CPU": processor}
            subprocess.run([*command, *arguments, times], env=environ, check=True, timeout=900, capture_output=True)
            counts.append(int(file.read()))
    return counts[1] - counts[0]


def compare_sve() -> None:
    """Instructions of the loop of kernels_gemm_sdot.cpp for as many products of SmolLM2's width."""
    build_plugin()
    program = WORK / "sve"
    command = [*GXX, "-O3", "-march=armv8.2-a+dotprod+sve", str(NATIVE / "instructions_sve.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    for name, vectors, processor in (
        ("neon", 1, "max"),
        ("sve", 1, "max,sve-max-vq=1"),
        ("sve", 2, "max,sve-max-vq=2"),
    ):
        print(f"{name:5} {128 * vectors} bits {count(program, '', name, processor=processor):6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--llama-cpp", type=Path, help="its sources")
    what.add_argument("--sve", action="store_true", help="only one loop, with NEON and with SVE")
    parser.add_argument("--tokens", default="64", help="of a prompt")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"])
    options = parser.parse_args()
    if options.sve:
        compare_sve()
        return
    for variant, (ours, theirs) in build(options.llama_cpp.resolve()).items():
        for kind, work in (("decode", ("1", "64")), ("prompt", (options.tokens, "0"))):
            for form in options.formats:
                counts = [count(program, variant, form, *work) / int(work[0]) for program in (ours, theirs)]
                print(f"{variant:15} {kind} {form:5} {counts[0]:12.0f} {counts[1]:12.0f} {counts[0] / counts[1]:.2f}")


if __name__ == "__main__":
    main()
