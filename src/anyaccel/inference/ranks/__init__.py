# SPDX-License-Identifier: Apache-2.0
"""Runs the model of a command, in this process or on ranks that share it."""
