# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint, or a model in memory, to packed weights in the decoder of csrc/llm, on one rank or several."""
