# SPDX-License-Identifier: Apache-2.0
"""Which model a command wants, and how it is to run; the command says it to its ranks in the same fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelOptions:
    """A model to load; see `init_inference` and `load_native`.

    Attributes:
        model: folder or GGUF file.
        dtype: of weights and arithmetic; "auto": what the file has.
        kv_cache: precision of the key/value cache; "auto" goes by `dtype`.
        threads: of the native runtime; 0: all CPUs that it may use.
        tp: ranks that share each layer.
        cache_bytes: most bytes of keys and values, on all ranks together; 0: what memory has room for.
        pp: stages that share the layers, of `tp` ranks each.
        draft: folder or GGUF file of a model that guesses its tokens; "": none.
        runtime: what runs it, as in InferenceConfig.
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
        """How many share the model."""
        return self.tp * self.pp

    @property
    def asked(self) -> str:
        """The options that ask for so many, in words."""
        return f"--tp {self.tp}" + (f" --pp {self.pp}" if self.pp > 1 else "")
