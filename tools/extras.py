# SPDX-License-Identifier: Apache-2.0
"""Prints the requirements of extras of pyproject.toml, so that the Makefile does not repeat them."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
wanted = [requirement.replace(" ", "") for name in sys.argv[1:] for requirement in extras[name]]
print(*(requirement for requirement in wanted if not requirement.startswith(f"{project['name']}[")))
