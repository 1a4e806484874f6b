# SPDX-License-Identifier: Apache-2.0
"""One file a backend: its BackendSpec and only the methods that differ. The one place for device names."""
