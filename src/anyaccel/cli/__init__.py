# SPDX-License-Identifier: Apache-2.0
"""The `anyaccel` command: each subcommand has its own module, which is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from anyaccel._version import __version__
from anyaccel.cli._interrupts import Interrupts, careful_interrupts
from anyaccel.cli._streams import drop_output, flush_output, output_fails, standard_streams
from anyaccel.errors import AnyAccelError
from anyaccel.terminal import did_you_mean, marked, terminal_width

# Maps each subcommand to its line in `anyaccel --help`. Its module, anyaccel.cli.<name>, has main(argv) -> exit code.
COMMANDS = {
    "run": "start a script on every device of this machine, or of several hosts, each worker bound to its own cores",
    "bind": "bind this process to its part of the machine and run a command, under torchrun, mpirun or srun",
    "topo": "draw packages, NUMA nodes, cores and caches, and which rank would get which cores",
    "generate": "generate text with a local Hugging Face or GGUF model, on one or several workers",
    "serve": "serve a local model with OpenAI's API and a chat page, many requests at once",
    "models": "list, show, pull and remove models of the Hugging Face Hub",
    "chat": "talk with a local Hugging Face or GGUF model",
    "embed": "make embeddings of texts with a local encoder or embedding model",
    "rerank": "order texts by how well they answer a query, with a local cross-encoder or reranker",
    "bench": "measure the speed of text generation, also in comparison with other engines",
    "quantize": "write a copy of a model with int4 or int8 weights",
    "port": "find what ties code to CUDA, and rewrite it for any accelerator",
    "report": "print versions, the accelerator and why it was chosen, CPU features and topology",
    "ops": "list, build or clean up the native ops of the accelerator",
    "compat": "make scripts that import deepspeed run on anyaccel in this environment",
    "conformance": "run every method of the accelerator interface on the device, and report failures",
    "completion": "print a completion script for bash, zsh or fish",
}


def _usage() -> str:
    import textwrap

    width = max(map(len, COMMANDS))
    room = max(20, terminal_width() - width - 4)
    lines = []
    for name, text in COMMANDS.items():
        first, *others = textwrap.wrap(text, room)
        lines += [f"  {name:{width}}  {first}", *(" " * (width + 4) + other for other in others)]
    return "\n".join(
        [
            "usage: anyaccel [--version] COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "anyaccel COMMAND --help shows options and examples.",
        ]
    )


def _say_error(message: str) -> None:
    print(f"anyaccel: {marked(f'error: {message}', sys.stderr)}", file=sys.stderr)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"anyaccel {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        near = did_you_mean(argv[0], COMMANDS)
        _say_error(f"unknown command {argv[0]!r}{near}; commands: {', '.join(COMMANDS)}")
        return 2
    module = importlib.import_module(f"anyaccel.cli.{argv[0]}")
    code: int = module.main(argv[1:])
    return code


def _deleted_folder_hint() -> str:
    """Text to add to an OSError when the current folder has been deleted, since its own message does not say so."""
    try:
        os.getcwd()
    except OSError:
        return "; the current folder is not there any more: cd to one that is, or to the same path again"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 failure, 2 bad usage, else a worker's own."""
    with standard_streams(), careful_interrupts() as interrupts:
        try:
            return flush_output(_exit_code(sys.argv[1:] if argv is None else argv, interrupts))
        except SystemExit as system_exit:  # argparse raises it, and may have printed the help before
            if code := flush_output(0):
                system_exit.code = system_exit.code or code
            raise


def _exit_code(argv: list[str], interrupts: Interrupts) -> int:
    try:
        code = _dispatch(argv)
        interrupts.raise_deferred()
        return code
    except AnyAccelError as error:
        _say_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        # A launcher and the terminal may both send SIGINT, and the second one would interrupt the clean-up.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("anyaccel: interrupted", file=sys.stderr)
        return 130
    except ImportError as error:
        if (message := _import_problem(error)) is None:
            raise
        _say_error(message)
        return 1
    except BrokenPipeError:
        drop_output()  # the reader has closed the pipe, as `| head` does
        return 141
    except OSError as error:
        if output_fails():  # `flush_output` prints the message
            return 1
        # The system's message is enough for too many open files, a full disk, or a file that may not be read.
        _say_error(f"{' '.join(str(error).split())}{_deleted_folder_hint()}")
        return 1


def _import_problem(error: ImportError) -> str | None:
    """The message for a package, or a native module, that is missing or damaged; None for a bug of our own."""
    package, _, module = (error.name or "").partition(".")
    reason = " ".join(str(error).split())
    if package == "anyaccel":
        if module not in ("_llm", "_native"):
            return None
        return f"the native part of anyaccel cannot be loaded ({reason}); install anyaccel again"
    if not package or package in sys.stdlib_module_names:
        return None
    if isinstance(error, ModuleNotFoundError):
        from anyaccel.extras import pip_line

        return f"the package {package} is missing ({reason}): {pip_line(package)}"
    return f"the package {package} is damaged ({reason}): pip install --force-reinstall {package}"
