# SPDX-License-Identifier: Apache-2.0
"""Models that the native decoder does not support: their own code with packed linears, and tensor parallelism."""
