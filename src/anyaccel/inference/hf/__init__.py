# SPDX-License-Identifier: Apache-2.0
"""Makes a native decoder a Hugging Face model: its class, its cache, and `generate` with its arguments."""
