# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: `header` reads, checks and makes the header, torch-free; `tensors` maps what it describes."""
