# SPDX-License-Identifier: Apache-2.0
"""Quantisation that looks at what the model computes on a text: error compensation, scaling, mixed precision."""
