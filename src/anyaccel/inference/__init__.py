# SPDX-License-Identifier: Apache-2.0
"""Inference of unmodified Hugging Face causal language models, on native kernels and divided among the ranks of a job.

Names load on first use: the native runtime and its command line get along without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel._lazy import lazy

if TYPE_CHECKING:
    from anyaccel.inference.encoders.sentence_transformers import add_to_sentence_transformers
    from anyaccel.inference.engine import InferenceEngine, init_inference, optimize
    from anyaccel.inference.generate import Generation, generate_tokens
    from anyaccel.inference.options import ModelOptions

__getattr__, __dir__ = lazy(
    __name__,
    {
        "add_to_sentence_transformers": "anyaccel.inference.encoders.sentence_transformers",
        "Generation": "anyaccel.inference.generate",
        "InferenceEngine": "anyaccel.inference.engine",
        "ModelOptions": "anyaccel.inference.options",
        "generate_tokens": "anyaccel.inference.generate",
        "init_inference": "anyaccel.inference.engine",
        "optimize": "anyaccel.inference.engine",
    },
)

__all__ = [
    "Generation",
    "InferenceEngine",
    "ModelOptions",
    "add_to_sentence_transformers",
    "generate_tokens",
    "init_inference",
    "optimize",
]
