# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.logging: a logger that writes to standard output, and messages of chosen ranks."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from .._cover import cover

__all__ = [
    "LoggerFactory", "get_current_level", "get_dist_msg", "get_log_level_from_string", "log_dist", "log_dist_once",
    "log_levels", "logger", "print_dist", "set_log_level_from_string", "should_log_le", "warning_once",
]  # fmt: skip

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _StandardOutput(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stdout is then."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> object:
        return sys.stdout


class LoggerFactory:
    """Makes loggers."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """A logger that writes to standard output, with time, level and place."""
        if name is None:
            raise ValueError("create_logger() needs a name")
        found = logging.getLogger(name)
        found.setLevel(level)
        found.propagate = False
        if not any(isinstance(handler, _StandardOutput) for handler in found.handlers):
            handler = _StandardOutput()
            handler.setFormatter(
                logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
            )
            found.addHandler(handler)
        return found


logger = LoggerFactory.create_logger(name="DeepSpeed")


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """`logger.warning`, once for the same arguments."""
    logger.warning(*args, **kwargs)


def get_dist_msg(message: object, ranks: Sequence[int] | None = None) -> str | None:
    """The message with this rank before it; None where the rank is not among `ranks` (-1 stands for all)."""
    rank = _rank()
    if rank is None:
        return f"[Rank -1] {message}"
    ranks = ranks or ()
    return f"[Rank {rank}] {message}" if rank in ranks or list(ranks[:1]) == [-1] else None


def _rank() -> int | None:
    """This rank, None outside of a job. Without torch there is none."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; see get_dist_msg."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, text, stacklevel=2)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """log_dist, once for the same arguments."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def print_dist(message: object, ranks: Sequence[int] | None = None) -> None:
    """Print a message on these ranks; see get_dist_msg."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        sys.stdout.write(f"{text}{os.linesep}")


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level such as "info"."""
    try:
        return log_levels[log_level_str.lower()]
    except KeyError:
        raise ValueError(f"{log_level_str!r} is no level of logging; use one of {', '.join(log_levels)}") from None


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger and its handlers; of `logger` when none is given."""
    level = get_log_level_from_string(log_level_str)
    target = logger if custom_logger is None else custom_logger
    target.setLevel(level)
    for handler in target.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """The level of `logger`."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether `logger` writes messages of this level."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


logger.warning_once = warning_once  # type: ignore[attr-defined]
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]

cover(globals())
