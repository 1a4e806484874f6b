# SPDX-License-Identifier: Apache-2.0
"""The settings of a server's engine."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.numerals import to_integer


@dataclass(frozen=True)
class EngineSettings:
    """How the engine schedules and caches.

    Attributes:
        max_batch: requests that run at once.
        max_context: tokens of a prompt and its answer; 0: what the model takes.
        cache_bytes: of keys and values; 0: a quarter of the memory that is available.
        max_waiting: requests that may wait; further ones are refused.
        step_s: the longest step while answers run and prompts are processed; 0: chosen from measured rates.
        timeout_s: of a request that does not set it.
        prefix_cache: whether requests share cached prefixes.
        cache_dir: a folder where keys and values of ended requests are kept; "": none.
        cache_disk_bytes: the most bytes of its files.
        draft_tokens: the most drafted tokens that a step verifies for an answer; 0: no drafts.
        draft_model: whether a draft model proposes them (the model's options name it); False: n-grams of the text.
        replicas: engines with the whole model, each on its own cores and with a part of `cache_bytes`; 0: one for each
            NUMA node.

    Raises:
        UsageError: a value is out of its range.
    """

    max_batch: int = 32
    max_context: int = 0
    cache_bytes: int = 0
    max_waiting: int = 256
    step_s: float = 0.0
    timeout_s: float = 600.0
    prefix_cache: bool = True
    cache_dir: str = ""
    cache_disk_bytes: int = 16 << 30
    replicas: int = 1
    draft_tokens: int = 0
    draft_model: bool = False

    def __post_init__(self) -> None:
        for name, least in {
            "max_batch": 1,
            "max_context": 0,
            "cache_bytes": 0,
            "cache_disk_bytes": 0,
            "max_waiting": 1,
            "replicas": 0,
            "draft_tokens": 0,
        }.items():
            if to_integer(name, getattr(self, name)) < least:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not 0 <= self.step_s < float("inf"):
            raise UsageError(f"step_s={self.step_s}: must be 0 (chosen from measured rates) or above")
        if not self.timeout_s > 0:
            raise UsageError(f"timeout_s={self.timeout_s}: must be above 0")
