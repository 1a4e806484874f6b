# SPDX-License-Identifier: Apache-2.0
"""Triton kernels in the place of several of torch's operators, one file a kernel; `choice.py` says whether they run."""
