# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back without torch: tokenizers, chat templates, strings that end an answer."""
