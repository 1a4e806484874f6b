# SPDX-License-Identifier: Apache-2.0
"""What a model runs in: `cpu` is the native decoder of csrc/llm, `torch` the Hugging Face module with native parts."""
