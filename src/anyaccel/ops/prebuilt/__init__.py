# SPDX-License-Identifier: Apache-2.0
"""The ops that were built with the wheel: one plain C library each, opened by its builder."""
