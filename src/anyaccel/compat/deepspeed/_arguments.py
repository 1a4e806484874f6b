# SPDX-License-Identifier: Apache-2.0
"""The arguments that scripts for DeepSpeed add to their own."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a script's parser; nothing here reads them."""
    group = parser.add_argument_group("DeepSpeed", "accepted, as by DeepSpeed")
    for name in ("deepspeed", "deepscale"):
        shown = None if name == "deepspeed" else argparse.SUPPRESS
        group.add_argument(f"--{name}", action="store_true", help=shown and "for the script itself")
        group.add_argument(f"--{name}_config", help=shown and "configuration file of the script")
    return parser
