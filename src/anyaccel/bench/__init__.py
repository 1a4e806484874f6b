# SPDX-License-Identifier: Apache-2.0
"""Language models under several engines, side by side: `anyaccel bench llm`."""
