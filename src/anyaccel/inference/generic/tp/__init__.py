# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: which shard of each weight a rank holds, and which outputs are all-reduced."""
