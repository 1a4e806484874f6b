# SPDX-License-Identifier: Apache-2.0
"""deepspeed.env_report, the command `ds_report`: the ops of this machine, and then all about it."""

from __future__ import annotations

import argparse

from anyaccel.cli import main as anyaccel

from ._cover import cover

__all__ = ["cli_main", "debug_report", "main", "op_report", "parse_arguments"]


def op_report(verbose: bool = True) -> None:
    """Print the ops, as `anyaccel ops` does; `verbose` is accepted."""
    anyaccel(["ops", "list"])


def debug_report() -> None:
    """Print versions, accelerator and topology, as `anyaccel report` does."""
    anyaccel(["report"])


def parse_arguments() -> argparse.Namespace:
    """The options of `ds_report`, from the command line."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Versions, ops, accelerator and topology.")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave the ops out")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="accepted")
    return parser.parse_args()


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report."""
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    debug_report()


def cli_main() -> None:
    """The command."""
    arguments = parse_arguments()
    main(arguments.hide_operator_status, arguments.hide_errors_and_warnings)


if __name__ == "__main__":
    cli_main()

cover(globals())
