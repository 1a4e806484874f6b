# SPDX-License-Identifier: Apache-2.0
"""The modules of a model in memory: what they hold, whether they were edited, and the packed ones in their places."""
