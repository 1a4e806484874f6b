# SPDX-License-Identifier: Apache-2.0
"""Reads weights and metadata from files (safetensors, GGUF, quantised checkpoints) through one protocol of sources."""
