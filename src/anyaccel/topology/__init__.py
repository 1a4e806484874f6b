# SPDX-License-Identifier: Apache-2.0
"""What this machine has and what this process may use of it: CPUs, cores, NUMA nodes. Never imports torch.

Caches and devices are in `anyaccel.topology.details`, which a launch does not import.
"""

from anyaccel.topology.model import Cpu, Machine, NumaNode, format_cpu_list, parse_cpu_list
from anyaccel.topology.sysfs import read_machine

__all__ = ["Cpu", "Machine", "NumaNode", "format_cpu_list", "parse_cpu_list", "read_machine"]
