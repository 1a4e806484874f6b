# SPDX-License-Identifier: Apache-2.0
"""Several processes that share one model and answer as one, started by a command; and the same model in one process."""
