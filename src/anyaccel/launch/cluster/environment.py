# SPDX-License-Identifier: Apache-2.0
"""Chooses the variables that are forwarded from the launcher to the workers on other hosts.

A later source wins over an earlier one:

1. variables of the launcher whose names begin with one of `PREFIXES`, less those of `KEPT_BACK`;
2. the file `.deepspeed_env` (or what DS_ENV_FILE names) and then `.anyaccel_env` of the home folder;
3. the same two of the current folder;
4. `--export NAME` and `--export NAME=VALUE`, in the order given.

What the launcher decides for each worker (RANK, MASTER_ADDR, ...) wins over all of them, so it is an error to name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from anyaccel.errors import UsageError
from anyaccel.launch.small_file import read_small_file
from anyaccel.vendors import VENDORS

# The documented table: docs/launching.md. A test compares it with export_prefixes of every backend.
PREFIXES: dict[str, tuple[str, ...]] = {
    "what programs and libraries are found by": ("PATH", "LD_LIBRARY", "PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX"),
    "threads and CPU libraries": ("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL", "ONEDNN", "OPENBLAS_", "MALLOC_"),
    "collectives and networks": ("NCCL", "RCCL", "CCL", "GLOO", "UCX", "UCC", "FI_", "I_MPI", "MV2_", "MVP_", "PSM"),
    "torch and models": ("TORCH", "PYTORCH", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "TRITON_"),
    "experiments": ("MLFLOW", "WANDB_"),
    "anyaccel and DeepSpeed": ("ANYACCEL_", "DS_"),
}  # fmt: skip
_GENERAL = tuple(prefix for group in PREFIXES.values() for prefix in group)
PREFIXES["accelerators"] = tuple(
    dict.fromkeys(
        prefix for vendor in VENDORS.values() for prefix in vendor.environment if not prefix.startswith(_GENERAL)
    )
)
_PREFIXES = (*_GENERAL, *PREFIXES["accelerators"])

# Not forwarded: the devices that a worker sees follow from the slots of its own host.
_DEVICES = [name for vendor in VENDORS.values() for name in (*vendor.visible, *vendor.of_a_host)]
# They have a forwarded prefix, but belong to the launcher's own process, job or host.
KEPT_BACK = (
    *_DEVICES,
    "TORCHELASTIC_",
    "MV2_COMM_",
    "MVP_COMM_",
    "I_MPI_INFO_",
    "I_MPI_HYDRA_",
    "I_MPI_PIN_INFO",
    "I_MPI_PIN_MAPPING",
    "DS_ENV_FILE",
    "PYTHONSTARTUP",
    "PYTHONINSPECT",
    "PYTHONBREAKPOINT",
)
# Secrets are not forwarded by default; `--export HF_TOKEN` forwards one on purpose.
_SECRETS = ("TOKEN", "PASSWORD", "SECRET", "API_KEY", "APIKEY", "CREDENTIALS", "ACCESS_KEY")

# Variables that the launcher, or one below it, sets for each worker.
_PER_WORKER = (
    *("RANK", "LOCAL_RANK", "CROSS_RANK", "GROUP_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_SIZE"),
)
_PER_WORKER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_WORLD_",
    "MPI_LOCAL",
    "SLURM_",
    "TORCHELASTIC_",
    "MV2_COMM",
    "MVP_COMM",
)
_OPTIONS = {"MASTER_ADDR": "--master_addr", "MASTER_PORT": "--master_port"}


def forwarded_environment(
    environ: Mapping[str, str], exports: Sequence[str] = (), folders: Sequence[str] = ()
) -> dict[str, str]:
    """The variables to forward, by name; the docstring of this module has the order of precedence.

    Args:
        environ: variables of the launcher.
        exports: values of `--export`, in their order.
        folders: where environment files may be, the most important one first: current folder, home folder.

    Raises:
        UsageError: a line of a file or an `--export` is malformed, names what is not set, or what each worker is
            given by the launcher.
    """
    found = {name: value for name, value in environ.items() if _is_forwarded(name)}
    names = (environ.get("DS_ENV_FILE") or ".deepspeed_env", ".anyaccel_env")
    paths = dict.fromkeys(str(Path(folder, name)) for folder in reversed(folders) for name in names)
    for path in paths:
        found.update(_read_file(path, {**environ, **found}))
    for export in exports:
        name, equals, value = export.partition("=")
        _check_name(name, f"--export {export!r}")
        if not equals:
            if name not in environ:
                raise UsageError(f"--export {name}: it is not set here; set it, or write --export {name}=VALUE")
            value = environ[name]
        found[name] = value
    return dict(sorted(found.items()))


def _is_forwarded(name: str) -> bool:
    if not name.startswith(_PREFIXES) or name.startswith(KEPT_BACK) or not _is_name(name):
        return False
    return not any(word in name for word in _SECRETS) or name.startswith("TOKENIZERS_")


def _is_name(name: str) -> bool:
    return name.isascii() and name.isidentifier()


def _check_name(name: str, where: str) -> None:
    if not _is_name(name):
        raise UsageError(f"{where}: {name!r} is not the name of a variable; write NAME=VALUE")
    if name in _OPTIONS:
        raise UsageError(f"{where}: {name} is given by the launcher; use {_OPTIONS[name]}")
    if name in _PER_WORKER or name.startswith(_PER_WORKER_PREFIXES):
        raise UsageError(f"{where}: the launcher gives each worker a {name} of its own; leave it out")


def _read_file(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment file; none where it is not there."""
    try:
        # Bytes that are not UTF-8 are kept, as in the environment of a process.
        text = read_small_file(path, "environment file", encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return parse_environment_file(text.removeprefix("\ufeff"), path, environ)


def parse_environment_file(text: str, name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a `.deepspeed_env` or `.anyaccel_env`: ``NAME=VALUE``, one a line.

    ``export`` before the name, empty lines and comments (``#`` after white space or at the beginning) are accepted.
    A value may stand in single quotes, where everything is literal, or in double quotes, where a backslash makes
    ``"``, ``\\``, ``$`` and a backquote literal. ``$NAME`` and ``${NAME}`` are replaced as a shell does it, by nothing
    where they are not set; commands are not run.

    Args:
        name: what messages call it: the path of the file.
        environ: where names are looked up that no earlier line has set.

    Raises:
        UsageError: a line is malformed. Names the line.
    """
    found: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        where = f"{name}:{number}"
        if line.startswith("export") and line[6:7].isspace():
            line = line[6:].lstrip()
        if not line or line.startswith("#"):
            continue
        variable, equals, value = line.partition("=")
        if not equals:
            raise UsageError(f"{where}: {line!r} sets no variable; write NAME=VALUE")
        _check_name(variable.rstrip(), where)
        if "\0" in value:
            raise UsageError(f"{where}: the value of {variable} has a NUL byte, which no variable can have")
        found[variable.rstrip()] = _value(value.lstrip(), where, {**environ, **found})
    return found


def _value(text: str, where: str, environ: Mapping[str, str]) -> str:
    if text[:1] not in ("'", '"'):
        return "".join(environ.get(name, "") if name else word for word, name in _references(_without_comment(text)))
    quote, value, position = text[0], "", 1
    while position < len(text) and text[position] != quote:
        if quote == '"' and text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`"):
            position += 1
        elif quote == '"' and text[position] == "$":
            word, name = next(_references(text[position:]))
            value += environ.get(name, "") if name else word
            position += len(word)
            continue
        value += text[position : position + 1]
        position += 1
    if position >= len(text):
        raise UsageError(f"{where}: the quote {quote} is not closed in this line; close it")
    rest = text[position + 1 :]
    if rest and not (rest.isspace() or (rest[0].isspace() and rest.lstrip().startswith("#"))):
        raise UsageError(f"{where}: {rest.strip()!r} follows the closing quote; put the whole value into quotes")
    return value


def _references(text: str) -> Iterator[tuple[str, str]]:
    """The text in pieces: ``$NAME`` and ``${NAME}`` each with the name, single characters between them with ""."""
    position = 0
    while position < len(text):
        word, name = text[position], ""
        if word == "$":
            rest = text[position + 1 :]
            if rest.startswith("{"):
                name = rest[1:].partition("}")[0] if "}" in rest else ""
                name = name if _is_name(name) else ""
                word = f"${{{name}}}" if name else word
            else:
                while _is_name(rest[: len(name) + 1]) and len(name) < len(rest):
                    name = rest[: len(name) + 1]
                word += name
        yield word, name
        position += len(word)


def _without_comment(text: str) -> str:
    if text.startswith("#"):
        return ""
    for position, character in enumerate(text):
        if character == "#" and text[position - 1].isspace():
            return text[:position].rstrip()
    return text
