# SPDX-License-Identifier: Apache-2.0
"""Inference of unmodified Hugging Face causal language models, divided among the ranks of a job."""

from anyaccel.inference.config import InferenceConfig, TensorParallelConfig
from anyaccel.inference.engine import InferenceEngine, init_inference
from anyaccel.inference.generate import Generation, generate_tokens

__all__ = [
    "Generation",
    "InferenceConfig",
    "InferenceEngine",
    "TensorParallelConfig",
    "generate_tokens",
    "init_inference",
]
