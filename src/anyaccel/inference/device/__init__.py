# SPDX-License-Identifier: Apache-2.0
"""DecoderSpec on any torch device; `runtime.load_device` is the way in."""
