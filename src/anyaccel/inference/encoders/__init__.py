# SPDX-License-Identifier: Apache-2.0
"""Encoders: hidden states of whole texts, embeddings made of them, and scores of texts."""
