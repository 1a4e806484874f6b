# SPDX-License-Identifier: Apache-2.0
"""Workers of one machine: bound, started, supervised and ended."""
