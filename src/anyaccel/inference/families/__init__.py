# SPDX-License-Identifier: Apache-2.0
"""What transformers' architectures and those of GGUF are: config -> DecoderSpec, and the names of their weights."""
