# SPDX-License-Identifier: Apache-2.0
"""What test_cluster.py writes into the configuration files of its hosts."""

# Runs in the new namespaces of a host: $1 its name, $2 the folder with its files.
HOST_SCRIPT = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p /run/sshd /run/munge /run/slurm
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$2/passwd" /etc/passwd
mount --bind "$2/ssh_config" /etc/ssh/ssh_config
mount --bind "$2/boot_id" /proc/sys/kernel/random/boot_id
[ ! -d /etc/slurm ] || mount --bind "$2/slurm" /etc/slurm
ip link set lo up
touch /run/ready
exec sleep infinity
"""

# No name service that only the machine can reach: an unknown name must be one at once.
NSSWITCH = "".join(f"{table}: files\n" for table in ("passwd", "group", "shadow", "hosts", "services", "protocols"))

SSHD_CONFIG = """
ListenAddress {address}
Port {port}
Port {other_port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
PrintMotd no
MaxStartups 100
MaxSessions 100
PidFile none
Subsystem sftp internal-sftp
"""

SSH_CONFIG = """
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  GlobalKnownHostsFile {folder}/known_hosts
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  UpdateHostKeys no
  KexAlgorithms curve25519-sha256
  LogLevel ERROR
"""

SLURM_CONFIG = """
ClusterName=test
SlurmctldHost={first}({first_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmdParameters=config_overrides
MailProg=/bin/true
ReturnToService=2
InactiveLimit=0
KillWait=5
WaitTime=0
TreeWidth=50
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
