# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server: a scheduler that batches requests continuously, and HTTP in front of it."""
