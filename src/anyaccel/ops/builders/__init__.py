# SPDX-License-Identifier: Apache-2.0
"""Sets of op builders, one module a set; the `op_builders` of a BackendSpec names the one of its accelerator."""
