# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ part against the torch of the environment that the package is installed into."""

import importlib.util
import site
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

# pip asks for metadata first; importing torch for that would cost seconds each time.
METADATA_ONLY = {"egg_info", "dist_info"} & set(sys.argv)


def find_torch() -> None:
    """Make `import torch` work within pip's build isolation.

    Isolation hides the environment's packages, but sys.prefix is still the environment: its torch is also the
    one that the result must fit (C++ ABI and version).
    """
    if importlib.util.find_spec("torch") is None:
        site.addsitedir(sysconfig.get_paths()["purelib"])
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        sys.exit(
            f"anyaccel-simd0 is built against the installed torch, and {sys.prefix} has none: install torch first; "
            "if it is installed elsewhere, add --no-build-isolation"
        )


def build_arguments() -> dict:
    find_torch()
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension = CppExtension(
        "anyaccel_simd0._C",
        sorted(map(str, Path("csrc").glob("*.cpp"))),
        depends=sorted(map(str, Path("csrc").glob("*.h"))),
        extra_compile_args=["-O1", "-g0", "-fvisibility=hidden"],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


setup(**({} if METADATA_ONLY else build_arguments()))
