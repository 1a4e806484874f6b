# SPDX-License-Identifier: Apache-2.0
"""The examples of DeepSpeed's documents, word for word, after `anyaccel compat install`, on the CPU.

They are from the accelerator setup guide, the accelerator abstraction interface and the pages about single
accelerators. What stands in angle brackets there is filled in; commands that install something are left out.
"""

import json
import os
import re
import sys

import pytest

from anyaccel.topology import read_machine
from environments import Environment
from warm import WarmPython

CORES = [cpu.id for cpu in read_machine().cores()]
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two allowed physical cores")


# One environment for all: none of these changes it.
@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("deepspeed") / "env")
    environment.run("python", "-m", "anyaccel", "compat", "install")
    return environment


@pytest.fixture(scope="module")
def warm(installed):
    """Python of that environment, with torch imported, and nothing of the alias."""
    path = f"{installed.bin}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path, "VIRTUAL_ENV": str(installed.folder)}
    env.pop("PYTHONPATH", None)
    with WarmPython(env, installed.folder, str(installed.bin / "python"), preload="torch") as warm:
        yield warm


@pytest.fixture
def shell(installed, tmp_path):
    """Runs a command line as a user types it, in a folder with a script that says where it runs."""
    (tmp_path / "inference.py").write_text(
        "import json, os, deepspeed\n"
        "shown = {'world': int(os.environ['WORLD_SIZE']), 'cores': sorted(os.sched_getaffinity(0)),\n"
        "         'master': os.environ['MASTER_ADDR'], 'version': deepspeed.__version__}\n"
        "open(f'rank-{os.environ[\"RANK\"]}.json', 'w').write(json.dumps(shown))\n"
    )

    def run(line, **more):
        return installed.run("bash", "-c", line, cwd=tmp_path, **{"DS_ACCELERATOR": "cpu", **more})

    run.folder = tmp_path
    return run


def shown(shell):
    return [json.loads(path.read_text()) for path in sorted(shell.folder.glob("rank-*.json"))]


@pytest.fixture
def python(warm, tmp_path):
    """Runs a script in a folder of its own: what it prints, standard error last."""

    def run(text, code=0, **more):
        (tmp_path / "example.py").write_text(text)
        done = warm.run("example.py", cwd=tmp_path, **more)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


# The setup guide ------------------------------------------------------------------------------------------


def test_setup_guide_binds_a_worker_for_each_numa_node(shell):
    shell("deepspeed --bind_cores_to_rank inference.py")
    nodes = [node for node in read_machine().nodes if node.cpus]
    assert len(shown(shell)) == max(1, len(nodes))
    assert {core for worker in shown(shell) for core in worker["cores"]} <= set(CORES)


@two_cores
def test_setup_guide_divides_a_list_of_cores(shell):
    """`deepspeed --num_accelerators 4 --bind_cores_to_rank --bind_core_list <0-27,32-59> inference.py`"""
    workers, cores = (4, "0-27,32-59") if set(range(60)) <= set(CORES) else (2, f"{CORES[0]},{CORES[1]}")
    shell(f"deepspeed --num_accelerators {workers} --bind_cores_to_rank --bind_core_list {cores} inference.py")
    assert [worker["world"] for worker in shown(shell)] == [workers] * workers
    if workers == 2:
        assert [worker["cores"] for worker in shown(shell)] == [[CORES[0]], [CORES[1]]]
    else:
        assert [worker["cores"][0] for worker in shown(shell)] == [0, 14, 32, 46]


def test_setup_guide_gives_those_workers_those_cores(python):
    said = python(
        "from deepspeed.utils.numa import get_numactl_cmd\n"
        "for rank in range(4): print(get_numactl_cmd('0-27,32-59', 4, rank)[1][-1])\n",
    )
    assert said.split() == ["0-13", "14-27", "32-45", "46-59"]


def test_setup_guide_hostfile(shell):
    """With this machine as the only host, no Intel MPI is needed; tests/cluster has real ones."""
    (shell.folder / "hostfile").write_text(
        "# hostfile content should follow the format\n"
        "# worker-1-hostname slots=<#sockets>\n"
        "# worker-2-hostname slots=<#sockets>\n"
        "# ...\n"
        "localhost slots=1\n"
    )
    shell("deepspeed --hostfile=hostfile --bind_cores_to_rank --launcher impi --master_addr 127.0.0.1 inference.py")
    (worker,) = shown(shell)
    assert worker["master"] == "127.0.0.1"


def test_setup_guide_validates_the_accelerator(installed, tmp_path):
    said = installed.run(
        "bash", "-c",
        "python - <<'END'\n"
        "import torch; print('torch:', torch.__version__)\n"
        "from deepspeed.accelerator import get_accelerator; print('accelerator:', get_accelerator()._name)\n"
        "END",
        cwd=tmp_path, DS_ACCELERATOR="cpu",
    )  # fmt: skip
    assert "torch: 2." in said
    assert "accelerator: cpu" in said


# The abstraction interface --------------------------------------------------------------------------------

AGNOSTIC = """
import torch
from deepspeed.accelerator import get_accelerator

if get_accelerator().is_available():
    pass

weight_shape, dtype, index = (2, 3), torch.float32, 0
my_tensor = torch.empty(weight_shape, dtype=dtype, device=get_accelerator().current_device_name())
local_rank = get_accelerator().current_device()
get_accelerator().default_generator(index).manual_seed(3)
names = get_accelerator().device_name(), get_accelerator().device_name(0), get_accelerator().device_name(1)
my_tensor = my_tensor.to(get_accelerator().device_name())
assert get_accelerator().on_accelerator(my_tensor)
pinned = get_accelerator().pin_memory(my_tensor)
alone = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
torch.distributed.init_process_group(get_accelerator().communication_backend_name(), **alone)
assert torch.distributed.get_backend() == get_accelerator().communication_backend_name()
print(names, local_rank)
torch.distributed.destroy_process_group()
"""


def test_interface_ports_runtime_calls_names_tensors_and_communication(python):
    assert python(AGNOSTIC) == "('cpu', 'cpu', 'cpu') 0\n"


@two_cores
def test_interface_leaves_cores_to_daemons(shell):
    """`deepspeed --bind_cores_to_rank --bind_core_list 0-51,56-107 <deepspeed-model-script>`"""
    cores = "0-51,56-107" if set(range(108)) <= set(CORES) else f"{CORES[0]}"
    shell(f"deepspeed --bind_cores_to_rank --bind_core_list {cores} inference.py")
    assert CORES[1] not in shown(shell)[0]["cores"] or cores == "0-51,56-107"


@two_cores
def test_interface_starts_as_many_workers_as_asked(shell):
    """`deepspeed --num_accelerators 4 --bind_cores_to_rank <deepspeed-model-script>`"""
    workers = 4 if len(CORES) >= 4 else 2
    shell(f"deepspeed --num_accelerators {workers} --bind_cores_to_rank inference.py")
    assert len(shown(shell)) == workers


EXTENSION = """
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator as Base
from deepspeed.ops.op_builder.builder import OpBuilder
import ctypes, torch

class SYCLOpBuilder(OpBuilder):
    def sycl_kernel_path(self, code_path):
        return os.path.join(HERE, code_path)

class TwiceBuilder(SYCLOpBuilder):
    BUILD_VAR = "DS_BUILD_TWICE"
    NAME = "twice"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"xyz.ops.{self.NAME}"

    def sources(self):
        return ["twice.cpp"]

class XYZ_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._name = "xyz"
        self._communication_backend_name = "gloo"

    def device_name(self, device_index=None):
        return "cpu"

    def set_device(self, device_index):
        pass

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def synchronize(self, device_index=None):
        pass

    def create_op_builder(self, class_name):
        return {"TwiceBuilder": TwiceBuilder}[class_name]()

set_accelerator(XYZ_Accelerator())
assert Base is DeepSpeedAccelerator
twice = get_accelerator().create_op_builder("TwiceBuilder").load().twice
twice.argtypes, twice.restype = [ctypes.c_int], ctypes.c_int
print(get_accelerator()._name, get_accelerator().current_device_name(), twice(21))
"""


def test_interface_takes_an_accelerator_extension_with_an_op(shell, python):
    (shell.folder / "twice.cpp").write_text('extern "C" int twice(int x) { return 2 * x; }\n')
    head = f"import os\nHERE = {str(shell.folder)!r}\n"
    assert python(head + EXTENSION).splitlines()[-1] == "xyz cpu 42"


# Pages about accelerators ---------------------------------------------------------------------------------


def test_environment_page_names_the_device(warm):
    code = "from deepspeed.accelerator import get_accelerator; print(get_accelerator().device_name())"
    assert warm.run("-c", code).stdout == "cpu\n"


def test_environment_page_unknown_and_missing_accelerators(warm):
    code = "from deepspeed.accelerator import get_accelerator; get_accelerator()"
    xpu, vpu = (warm.run("-c", code, DS_ACCELERATOR=name) for name in ("xpu", "vpu"))
    assert (xpu.returncode, vpu.returncode) == (1, 1)
    assert "XPU_Accelerator requires intel_extension_for_pytorch" in xpu.stderr
    assert "DS_ACCELERATOR='vpu' is not known" in vpu.stderr


CPU_PAGE = """
# Explicitly set CPU accelerator
import os
import re
os.environ['DS_ACCELERATOR'] = 'cpu'

from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()

print(f"Device: {accelerator.device_name()}")  # 'cpu'
print(f"Backend: {accelerator.communication_backend_name()}")  # 'ccl' or 'gloo'
print(f"Memory: {accelerator.memory_allocated()}")  # RSS in bytes

# CPU supports BF16 but FP16 support depends on MKL-DNN
print(f"BF16: {accelerator.is_bf16_supported()}")  # True
print(f"FP16: {accelerator.is_fp16_supported()}")  # Varies

# Get CPU-specific op builders
ccl_builder = accelerator.get_op_builder('CCLCommBuilder')
adam_builder = accelerator.get_op_builder('CPUAdamBuilder')
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
"""


def test_cpu_page(python):
    said = dict(line.split(": ") for line in python(CPU_PAGE).splitlines())
    assert said["Device"] == "cpu"
    assert said["Backend"]
    assert int(said["Memory"]) > 10_000_000
    assert said["BF16"] == "True"


# The page about the XPU; with the accelerator of this test in place of its first lines' 'xpu'.
XPU_PAGE = """
import os, torch
os.environ['DS_ACCELERATOR'] = 'cpu'

from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()

print(f"Device: {accelerator.device_name()}")  # 'xpu'
print(f"Backend: {accelerator.communication_backend_name()}")  # 'ccl' or 'xccl'

# Device management
print(f"Device count: {accelerator.device_count()}")
accelerator.set_device(0)
print(f"Current device: {accelerator.current_device_name()}")

# Precision support - both available
print(f"FP16: {accelerator.is_fp16_supported()}")  # True
print(f"BF16: {accelerator.is_bf16_supported()}")  # True
print(f"Triton: {accelerator.is_triton_supported()}")  # False

# Memory operations
total = accelerator.total_memory(0)
allocated = accelerator.memory_allocated(0)
available = accelerator.available_memory(0)

# Pin memory with alignment options
tensor = torch.randn(1000)
pinned_tensor = accelerator.pin_memory(tensor, align_bytes=1)
aligned_tensor = accelerator.pin_memory(tensor, align_bytes=0)

# Note: default_stream returns current_stream
default = accelerator.default_stream()
current = accelerator.current_stream()
print(f"Streams same: {default is current}")  # True (workaround)

# Synchronization
accelerator.synchronize()
from deepspeed.accelerator.xpu_accelerator import XPU_Accelerator
"""


def test_xpu_page_on_the_cpu(python):
    said = dict(line.split(": ") for line in python(XPU_PAGE).splitlines())
    assert said["Current device"] == "cpu"
    assert int(said["Device count"]) >= 1


# What its users do besides --------------------------------------------------------------------------------

COLLECTIVES = """
import torch, deepspeed
from deepspeed import comm as dist

deepspeed.init_distributed(verbose=False)
rank, size = dist.get_rank(), dist.get_world_size()
one = torch.full((4,), float(rank + 1))
dist.all_reduce(one, op=dist.ReduceOp.SUM, prof=True, log_name="x"); assert one.tolist() == [3.0] * 4
same = torch.full((2,), float(rank)); dist.broadcast(same, src=1); assert same.tolist() == [1.0] * 2
dist.inference_all_reduce(same); assert same.tolist() == [2.0] * 2
parts = [torch.empty(1) for _ in range(size)]; dist.all_gather(parts, torch.tensor([float(rank)]))
assert torch.cat(parts).tolist() == [0.0, 1.0]
own, whole = torch.tensor([float(rank)]), torch.empty(size)
dist.all_gather_into_tensor(whole, own); assert whole.tolist() == [0, 1]
whole.zero_(); dist.allgather_fn(whole, own); assert whole.tolist() == [0, 1]
whole.zero_(); dist.all_gather_coalesced([whole], [own]); assert whole.tolist() == [0, 1]
objects = [None] * size; dist.all_gather_object(objects, rank); assert objects == [0, 1]
objects = [rank]; dist.broadcast_object_list(objects, src=1); assert objects == [1]
got = torch.empty(1)
work = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.tensor([float(rank)]), 1 - rank),
                               dist.P2POp(dist.irecv, got, 1 - rank)])
[w.wait() for w in work]; assert got.item() == 1 - rank
if rank == 0: dist.send(torch.ones(1), 1)
else: dist.recv(got, 0); assert got.item() == 1
total = torch.tensor([1.0]); dist.reduce(total, dst=0); assert rank or total.item() == 2
gathered = [torch.empty(1) for _ in range(2)] if rank == 0 else None
dist.gather(torch.tensor([float(rank)]), gathered, dst=0)
mine = torch.empty(1); dist.scatter(mine, [torch.zeros(1), torch.ones(1)] if rank == 0 else None, src=0)
assert mine.item() == rank
shares = torch.empty(1); dist.reduce_scatter_tensor(shares, torch.arange(2.0)); assert shares.item() == 2 * rank
shares = torch.empty(1); dist.reduce_scatter_fn(shares, torch.arange(2.0)); assert shares.item() == 2 * rank
shares = torch.empty(1); dist.reduce_scatter(shares, [torch.zeros(1), torch.ones(1)]); assert shares.item() == 2 * rank
mixed = torch.empty(2); dist.all_to_all_single(mixed, torch.full((2,), float(rank))); assert mixed.tolist() == [0, 1]
group = dist.new_group([0, 1]); assert dist.get_all_ranks_from_group(group) == [0, 1]
assert dist.get_global_rank(group, 1) == 1 and dist.get_local_rank() == rank and dist.get_world_group() is not None
assert dist.initialize_mesh_device((2,), ("data",)).size() == 2
from torch import nn
from deepspeed.module_inject import LinearAllreduce, LinearLayer
torch.manual_seed(0); up, down, x = nn.Linear(4, 8), nn.Linear(8, 4), torch.randn(3, 4)
torch.testing.assert_close(LinearAllreduce(down, group)(LinearLayer(up, group)(x)), down(up(x)).detach())
dist.configure(enabled=True); dist.all_reduce(torch.ones(4)); dist.log_summary(show_straggler=True)
assert dist.has_comm_data() and dist.get_logged_comm_ops() == ["all_reduce"] and dist.get_comm_operation_count() == 1
dist.reset_log(); assert not dist.has_comm_data()
dist.monitored_barrier(); dist.barrier(); dist.destroy_process_group()
print("rank done")
"""


@pytest.mark.slow  # an environment of its own; the next test starts a job with the alias as well
def test_collectives_in_a_job_of_two_without_an_installation(tmp_path):
    """`anyaccel run --as-deepspeed`: in an environment that has no alias, which it has not afterwards either."""
    environment = Environment(tmp_path / "env")
    (tmp_path / "work.py").write_text(COLLECTIVES)
    said = environment.run(
        "python", "-m", "anyaccel", "run", "--as-deepspeed", "--num_accelerators", "2", "--no_local_rank", "work.py",
        cwd=tmp_path, DS_ACCELERATOR="cpu", PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    assert said.count("rank done") == 2
    assert "16 B" in said  # the log of that one all_reduce
    assert environment.files() == environment.before
    assert "No module named 'deepspeed'" in environment.run("python", "-c", "import deepspeed", code=1)


def test_one_job_may_have_the_alias_before_a_deepspeed_that_is_installed(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "deepspeed").mkdir(parents=True)
    (theirs / "deepspeed" / "__init__.py").write_text("raise RuntimeError('the real one')")
    (tmp_path / "x.py").write_text("import deepspeed; print(deepspeed.__version__)")
    environment = Environment(tmp_path / "env")
    line = ["python", "-m", "anyaccel", "run", "--as-deepspeed", "--num_accelerators", "1", "--no_local_rank", "x.py"]
    assert "+anyaccel." in environment.run(*line, cwd=tmp_path, PYTHONPATH=str(theirs))
    plan = json.loads(environment.run(*line[:4], "--dry-run", "--json", *line[4:], cwd=tmp_path, PYTHONPATH="/mine"))
    assert plan["ranks"][0]["env"]["PYTHONPATH"].endswith("compat:/mine")


def test_it_comes_along_to_other_hosts(tmp_path):
    """Two names of this machine are two hosts."""
    environment = Environment(tmp_path / "env")
    (tmp_path / "x.py").write_text(
        "import deepspeed, os\n"
        "line = os.environ['RANK'] + ' ' + deepspeed.__version__ + '\\n'\n"
        "os.write(1, line.encode())\n"  # in one piece: the pieces of hosts are mixed
    )
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    said = environment.run(
        "python", "-m", "anyaccel", "run", "--as-deepspeed", "--hostfile", "hosts", "--no_local_rank", "x.py",
        cwd=tmp_path, DS_ACCELERATOR="cpu",
    )  # fmt: skip
    assert sorted(line.split("+")[1].split(".")[0] for line in said.splitlines() if "+" in line) == ["anyaccel"] * 2


TRAINING = """
import deepspeed
try:
    deepspeed.initialize(model=None)
except AttributeError as error:
    print(error)
try:
    from deepspeed.runtime.zero.stage3 import X
except ImportError as error:
    print(error)
"""


def test_what_is_out_of_scope_says_so_in_one_line(python):
    first, second = python(TRAINING).splitlines()
    assert first.startswith("deepspeed.initialize is not part of anyaccel's alias of DeepSpeed: the training engine")
    assert second.startswith("deepspeed.runtime.zero is not part")


@pytest.mark.slow
def test_ds_report_and_the_scripts_help(shell):
    said = shell("ds_report")
    assert "cpu_adam" in said
    assert "accelerator" in said
    assert "cpu_adam" not in shell("ds_report --hide_operator_status")
    assert "--bind_core_list" in shell("deepspeed --help")


def test_a_failing_job_has_its_exit_code(installed, tmp_path):
    (tmp_path / "fail.py").write_text("raise SystemExit(7)")
    installed.run("deepspeed", "--num_gpus", "1", "fail.py", cwd=tmp_path, code=7)


def test_import_is_quick_and_brings_no_torch(shell):
    said = shell("python -c \"import deepspeed, deepspeed.launcher.runner, sys; print('torch' in sys.modules)\"")
    assert said == "False\n"


@pytest.mark.slow
def test_transformers_is_not_taken_in(python):
    """Packages that look for DeepSpeed ask for its metadata, which the alias does not have."""
    pytest.importorskip("transformers")
    said = python("from transformers.integrations import is_deepspeed_available; print(is_deepspeed_available())")
    assert said.splitlines()[-1] == "False"


TUTORIAL = """
import deepspeed, torch
from transformers import pipeline
generator = pipeline('text-generation', model=MODEL)
generator.model = deepspeed.init_inference(generator.model,
                                           tensor_parallel={"tp_size": 1},
                                           dtype=torch.float,
                                           replace_with_kernel_inject=True)
print(generator("DeepSpeed is", do_sample=False, max_new_tokens=4)[0]["generated_text"])
"""


@pytest.mark.slow
def test_inference_tutorial_in_a_pipeline(python, smollm2):
    said = python(TUTORIAL.replace("MODEL", repr(str(smollm2))))
    # Standard error comes last, with the progress bars of transformers.
    assert [line for line in said.splitlines() if re.match(r"DeepSpeed is \S+ \S", line)], said


def test_nothing_of_this_is_in_the_environment_of_the_tests():
    assert not any("anyaccel/compat" in entry for entry in sys.path)
