# SPDX-License-Identifier: Apache-2.0
"""Weights and metadata as they lie in files: safetensors, GGUF, quantised checkpoints, as one protocol of sources."""
