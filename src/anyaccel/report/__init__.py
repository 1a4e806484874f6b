# SPDX-License-Identifier: Apache-2.0
"""What `anyaccel report` shows: collected as plain data, rendered as text or JSON."""
