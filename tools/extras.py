# SPDX-License-Identifier: Apache-2.0
"""Prints the requirements of extras of pyproject.toml, so that the Makefile does not repeat them."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*(requirement.replace(" ", "") for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra]))
