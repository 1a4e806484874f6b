# SPDX-License-Identifier: Apache-2.0
"""The model of a command, and how it is run; the command sends the same fields to its ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelOptions:
    """A model to load; see `init_inference` and `load_native`.

    Attributes:
        model: folder or GGUF file.
        dtype: the dtype of weights and arithmetic; "auto": that of the file.
        group_size: the group size of int4.
        kv_cache: precision of the key/value cache; "auto": by `dtype`.
        threads: threads of the native runtime; 0: all CPUs that it may use.
        tp: tensor-parallel ranks, which share each layer.
        cache_bytes: the most bytes of keys and values, on all ranks together; 0: as much as memory has room for.
        pp: pipeline stages, of `tp` ranks each.
        draft: folder or GGUF file of a draft model; "": none.
        runtime: the runtime, as in InferenceConfig.
    """

    model: str
    dtype: str = "bf16"
    group_size: int = 32
    kv_cache: str = "auto"
    threads: int = 0
    tp: int = 1
    cache_bytes: int = 0
    pp: int = 1
    draft: str = ""
    runtime: str = "auto"

    @property
    def ranks(self) -> int:
        """The number of ranks that share the model."""
        return self.tp * self.pp

    @property
    def asked(self) -> str:
        """The command-line options for this number of ranks, for messages."""
        return f"--tp {self.tp}" + (f" --pp {self.pp}" if self.pp > 1 else "")
