# SPDX-License-Identifier: Apache-2.0
"""A decoder as data: what it computes, where its weights are in a checkpoint, how its heads and features divide."""
