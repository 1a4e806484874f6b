# SPDX-License-Identifier: Apache-2.0
"""From requests to tokens and back: conversations, templates, grammars, tool calls, reasoning."""
