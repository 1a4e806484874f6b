# SPDX-License-Identifier: Apache-2.0
"""Models that the native decoder does not know: their own code with packed linears, divided by tensor parallelism."""
