# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: which part of which weight each rank holds, and where the ranks add up."""
