# SPDX-License-Identifier: Apache-2.0
"""Jobs of several machines: who takes part, how they are reached, and the agents that run there."""
