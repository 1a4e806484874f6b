# SPDX-License-Identifier: Apache-2.0
"""What a job needs of the machine, and the plan that is made of it; nothing here starts anything."""
