# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the text of an answer: one module for each format that models write, and the parsers of answers."""
