# SPDX-License-Identifier: Apache-2.0
"""The alias of DeepSpeed: its names, arguments and errors. Real jobs are in tests/e2e/test_compat.py."""

import argparse
import importlib
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import anyaccel
from anyaccel.accelerator import Accelerator, get_accelerator, set_accelerator
from anyaccel.accelerator.backends.cpu import CpuAccelerator
from anyaccel.compat import deepspeed
from anyaccel.compat.deepspeed import _names
from anyaccel.errors import (
    AnyAccelError,
    NotCoveredAttributeError,
    NotCoveredError,
    NotCoveredImportError,
    UsageError,
)
from generators import deepspeed as deepspeed_page

ROOT = Path(__file__).parents[3]

# The scripts call it `deepspeed`; here it is imported beside tests of other things, under its own name.
ALIAS = "anyaccel.compat.deepspeed"
MODULES = deepspeed_page.RECORDED["modules"]


def module(name):
    return importlib.import_module(f"{ALIAS}{name.removeprefix('deepspeed')}")


def test_every_module_of_the_alias_is_one_of_deepspeeds():
    folder = Path(deepspeed.__file__).parent
    files = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    names = {".".join(["deepspeed", *path.parts]).removesuffix(".__init__") for path in files if path.name[0] != "_"}
    names |= {".".join(["deepspeed", *path.parts[:-1]]) for path in files if path.name == "__init__"}
    names |= {f"deepspeed.{name}" for name in _names.MODULES}
    # Packages whose names are those of their modules are not recorded.
    assert names - set(MODULES) == {"deepspeed.inference"}


# What the page promises: module -> names that are covered.
PROMISED = {
    name: re.findall(r"`(\w+)`", names)
    for name, names in re.findall(r"^### `(\S+)`\n(?:\nCovered: (.*))?", deepspeed_page.PAGE.read_text(), re.MULTILINE)
}
# Classes whose objects are made by a function of the alias, as the page says; their constructors are their own.
MADE_BY_FUNCTIONS = ("InferenceEngine",)


@pytest.mark.parametrize("name", [name for name, members in PROMISED.items() if members])
def test_what_is_covered_takes_deepspeeds_arguments(name):
    for member in PROMISED[name]:
        ours, entry = getattr(module(name), member), MODULES[name][member]
        parameters = None if member in MADE_BY_FUNCTIONS else entry.get("parameters")
        assert deepspeed_page.missing_arguments(parameters, ours) == [], member
        for method in deepspeed_page.methods(entry, ours)[0]:
            missing = deepspeed_page.missing_arguments(entry["methods"][method], getattr(ours, method))
            assert missing == [], f"{member}.{method}"


def test_what_is_not_covered_is_an_error():
    there = set(PROMISED)
    for name in set(MODULES) - there:
        with pytest.raises(NotCoveredImportError):
            module(name)
    for name in there & set(MODULES):
        for member in set(MODULES[name]) - set(PROMISED[name]):
            with pytest.raises((NotCoveredAttributeError, NotCoveredImportError)):
                getattr(module(name), member)


def test_the_comparison_of_arguments_sees_what_is_missing():
    def ours(a, c, b=0):
        pass

    both = [["a", "POSITIONAL_OR_KEYWORD", False], ["b", "POSITIONAL_OR_KEYWORD", True]]
    assert deepspeed_page.missing_arguments(both, ours) == ["b", "c (is not optional here)"]
    assert deepspeed_page.missing_arguments([["z", "KEYWORD_ONLY", True]], lambda: None) == ["z"]


def test_names_that_the_issue_lists_are_covered():
    wanted = """
    accelerator: get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator
    accelerator.cpu_accelerator: CPU_Accelerator
    accelerator.cuda_accelerator: CUDA_Accelerator
    accelerator.xpu_accelerator: XPU_Accelerator
    accelerator.npu_accelerator: NPU_Accelerator
    accelerator.mps_accelerator: MPS_Accelerator
    accelerator.hpu_accelerator: HPU_Accelerator
    accelerator.mlu_accelerator: MLU_Accelerator
    accelerator.sdaa_accelerator: SDAA_Accelerator
    comm: inference_all_reduce ReduceOp log_summary all_reduce init_distributed get_rank get_world_size barrier
    ops.op_builder: CPUAdamBuilder AsyncIOBuilder FusedAdamBuilder OpBuilder
    ops.op_builder.builder: OpBuilder
    ops.op_builder.all_ops: ALL_OPS
    ops.adam: DeepSpeedCPUAdam FusedAdam
    ops.adagrad: DeepSpeedCPUAdagrad
    ops.lion: DeepSpeedCPULion
    ops.aio: AsyncIOBuilder
    utils: logger OnDevice get_numactl_cmd
    utils.numa: parse_range_list get_numactl_cmd get_numa_cores
    launcher.runner: main parse_args fetch_hostfile parse_resource_filter parse_inclusion_exclusion
    launcher.multinode_runner: OpenMPIRunner MPICHRunner IMPIRunner SlurmRunner MVAPICHRunner
    module_inject.auto_tp: AutoTP
    """
    for line in filter(None, map(str.strip, wanted.splitlines())):
        name, _, members = line.partition(":")
        found = module(f"deepspeed.{name}")
        for member in members.split():
            assert getattr(found, member) is not None
    for member in ("init_inference", "init_distributed", "get_accelerator", "OnDevice", "logger", "comm", "ops"):
        assert getattr(deepspeed, member) is not None


# Errors about the rest ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["initialize", "zero", "DeepSpeedEngine", "PipelineModule", "no_such_thing"])
def test_what_is_not_covered_is_named_with_where_to_read_on(name):
    with pytest.raises(NotCoveredAttributeError, match=rf"deepspeed\.{name} is not part.*docs/deepspeed-names.md") as e:
        getattr(deepspeed, name)
    assert isinstance(e.value, AnyAccelError)
    assert not hasattr(deepspeed, name)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("from {} import initialize", "deepspeed.initialize"),
        ("import {}.zero", "deepspeed.zero"),
        ("from {}.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3", "deepspeed.runtime.zero"),
        ("from {}.utils.numa import no_such_thing", "deepspeed.utils.numa.no_such_thing"),
        ("from {}.ops.op_builder import TransformerBuilder", "deepspeed.ops.op_builder.TransformerBuilder"),
        ("from {}.comm import CCLBackend", "deepspeed.comm.CCLBackend"),
    ],
)
def test_importing_what_is_not_covered_says_the_same(statement, named):
    with pytest.raises(NotCoveredImportError) as error:
        exec(statement.format(ALIAS))
    assert str(error.value).startswith(f"{named} is not part of anyaccel's alias")


def test_out_of_scope_says_what_there_is_instead():
    with pytest.raises(NotCoveredAttributeError, match="FSDP2"):
        _ = deepspeed.initialize
    with pytest.raises(NotCoveredImportError, match="out of scope"):
        importlib.import_module(f"{ALIAS}.runtime.zero")


def test_missing_dunders_are_pythons_own_error():
    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        _ = deepspeed.__wrapped__


def test_the_version_is_deepspeeds_with_ours_behind():
    assert deepspeed.__version__ == f"{deepspeed_page.RECORDED['version']}+anyaccel.{anyaccel.__version__}"
    assert (deepspeed.__version_major__, deepspeed.__version_minor__) == (0, 19)


# accelerator ----------------------------------------------------------------------------------------------


@pytest.fixture
def restore():
    before = get_accelerator()
    yield
    set_accelerator(before)


def test_our_accelerators_are_deepspeeds():
    from anyaccel.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from anyaccel.compat.deepspeed.accelerator import DeepSpeedAccelerator

    assert CPU_Accelerator is CpuAccelerator
    assert isinstance(get_accelerator(), DeepSpeedAccelerator)
    assert issubclass(CPU_Accelerator, DeepSpeedAccelerator)
    assert not issubclass(int, DeepSpeedAccelerator)


@pytest.mark.parametrize("name", ["cpu", "cuda", "xpu", "npu", "mps", "hpu", "mlu", "sdaa"])
def test_each_backend_has_all_abstract_methods(name, monkeypatch):
    """As DeepSpeed's own test has it, which looks for the files of its backends; here a table names the modules."""
    found = getattr(module(f"deepspeed.accelerator.{name}_accelerator"), f"{name.upper()}_Accelerator")
    monkeypatch.setattr(found, "__init__", lambda self: None)
    assert isinstance(found(), module("deepspeed.accelerator").DeepSpeedAccelerator)


def test_an_accelerator_in_deepspeeds_way_is_used(restore):
    """As extensions for DeepSpeed write it: no spec, and the base's constructor is not called."""
    from anyaccel.compat.deepspeed.accelerator import DeepSpeedAccelerator
    from anyaccel.compat.deepspeed.accelerator import set_accelerator as choose

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

        def communication_backend_name(self):
            return self._communication_backend_name

    class Other(DeepSpeedAccelerator):
        pass

    own = XYZ_Accelerator()
    choose(own)
    assert get_accelerator() is own
    assert own._name == "xyz"
    assert own.communication_backend_name() == "gloo"
    assert own.has("collectives")
    assert not own.has("streams")
    assert torch.zeros(2, device=own.current_device_name()).is_cpu
    assert isinstance(own, Accelerator)
    assert not isinstance(own, Other)
    with pytest.raises(AnyAccelError, match="'xyz' does not have 'memory_stats'"):
        own.memory_allocated()
    with pytest.raises(TypeError, match="abstract"):
        Other()
    with pytest.raises(TypeError, match="takes an"):
        choose("cpu")


# inference ------------------------------------------------------------------------------------------------


def small_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (None, {"dtype": torch.float32, "replace_with_kernel_inject": True}),
        ({"dtype": "fp32", "tensor_parallel": {"tp_size": 1, "tp_grain_size": 64}, "max_out_tokens": 2048}, {}),
        ({"dtype": torch.float32}, {"dtype": torch.float32, "mp_size": 1, "injection_policy": {}, "moe": False}),
    ],
)
def test_init_inference_takes_deepspeeds_options(config, options):
    model = small_model()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
    engine = deepspeed.init_inference(model, config, **options)
    assert isinstance(engine, deepspeed.InferenceEngine)
    assert engine.module is not None
    torch.testing.assert_close(engine(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_init_inference_reads_a_file_and_has_deepspeeds_default_dtype(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"tensor_parallel": {"tp_size": 1}, "replace_with_kernel_inject": false}')
    engine = deepspeed.init_inference(small_model(), str(file))
    assert engine.dtype == torch.float16
    with pytest.raises(NotCoveredError, match=r"InferenceEngine\.model_times\(\) is not covered .*around generate"):
        engine.model_times()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"moe": True}, NotCoveredError, r"init_inference\(moe=...\)"),
        ({"quant": {"enabled": True}}, NotCoveredError, "torch.int8"),
        ({"checkpoint": "c.json"}, NotCoveredError, "path of the model's folder"),
        ({"tensor_parallel": {"tp_size": 1, "mpu": object()}}, NotCoveredError, "consecutive ranks"),
        ({"triangular_masking": False}, NotCoveredError, "causal"),
        ({"no_such_option": 1}, UsageError, "no option 'no_such_option'"),
        ({"config": {"dtype": "fp32"}, "dtype": "bf16"}, UsageError, "dtype is 'fp32' in config, and 'bf16'"),
        ({"config": "/no/such/file"}, UsageError, "cannot be read"),
        ({"config": 3}, UsageError, "must be a dict"),
    ],
)
def test_init_inference_refuses_what_would_change_results(options, kind, message):
    with pytest.raises(kind, match=message):
        deepspeed.init_inference(nn.Linear(2, 2), **options)


def test_auto_tp_tells_which_linears_are_summed():
    from anyaccel.compat.deepspeed.module_inject.auto_tp import AutoTP

    model = small_model()
    ((layer, names),) = AutoTP.tp_parser(model)
    assert layer.__name__ == "LlamaDecoderLayer"
    assert names == ["mlp.down_proj", "self_attn.o_proj"]
    assert AutoTP.supported(model)
    assert not AutoTP.supported(nn.Linear(2, 2))
    with pytest.raises(NotCoveredError, match="init_inference"):
        AutoTP(model)


def test_layers_of_one_rank_compute_the_whole():
    from anyaccel.compat.deepspeed.module_inject import LinearAllreduce, LinearLayer, set_autotp_mode

    linear, x = nn.Linear(6, 4), torch.randn(3, 6)
    torch.testing.assert_close(LinearAllreduce(linear, None, name="o_proj")(x), linear(x).detach())
    torch.testing.assert_close(LinearLayer(linear, None)(x), linear(x).detach())
    set_autotp_mode(training=False)
    with pytest.raises(NotCoveredError, match=r"torch\.distributed\.tensor\.parallel"):
        set_autotp_mode(training=True)
    with pytest.raises(NotCoveredError, match="gather_output"):
        LinearLayer(linear, None, gather_output=True)


# ops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adam.DeepSpeedCPUAdam", torch.optim.AdamW),
        ("adagrad.DeepSpeedCPUAdagrad", torch.optim.Adagrad),
        ("lion.DeepSpeedCPULion", None),
    ],
)
def test_optimizers_take_model_params(name, reference):
    package, _, kind = name.partition(".")
    optimizer = getattr(module(f"deepspeed.ops.{package}"), kind)
    ours, theirs = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    ours.grad = theirs.grad = torch.linspace(-1, 1, 8)
    optimizer(model_params=[ours], lr=0.1, weight_decay=0.0).step()
    assert not torch.equal(ours, torch.ones(8))
    if reference is not None:
        reference([theirs], lr=0.1, weight_decay=0.0).step()
        torch.testing.assert_close(ours, theirs)


def test_builders_are_those_of_the_accelerator():
    from anyaccel.compat.deepspeed.ops.op_builder import CPUAdamBuilder
    from anyaccel.compat.deepspeed.ops.op_builder.all_ops import ALL_OPS, accelerator_name

    assert CPUAdamBuilder is get_accelerator().get_op_builder("CPUAdamBuilder")
    assert accelerator_name == get_accelerator()._name
    assert {"cpu_adam", "async_io"} <= set(ALL_OPS)
    assert module("deepspeed.ops.aio").AsyncIOBuilder().load().aio_handle


# utils ----------------------------------------------------------------------------------------------------


def test_on_device_makes_models_on_meta_and_in_a_dtype():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(4, 4)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    with deepspeed.OnDevice(dtype=torch.float64, device="cpu"), deepspeed.OnDevice(torch.float16, enabled=False):
        assert torch.ones(2).dtype == torch.float64
        assert torch.arange(2).dtype == torch.int64
    assert torch.ones(2).dtype == torch.float32
    with pytest.raises(ZeroDivisionError), deepspeed.OnDevice(dtype=torch.float64):
        _ = 1 / 0
    assert torch.ones(2).dtype == torch.float32


def test_on_device_goes_by_the_page():
    """What docs/deepspeed-names.md says of it: nothing of torch is replaced."""
    functions = torch.empty, torch.Tensor.__new__
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        assert (torch.empty, torch.Tensor.__new__) == functions
        # Not torch.linspace: once transformers has loaded a model, torch may not know it as one that makes tensors.
        for made in (torch.randn(2), torch.tensor([1.0]), torch.full((2,), 1.0), torch.rand(2)):
            assert (made.is_meta, made.dtype) == (True, torch.bfloat16)
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float32
        allocated = torch.Tensor(2, 3)
        assert (allocated.device.type, allocated.dtype) == ("cpu", torch.bfloat16)
        assert torch.FloatTensor(2).device.type == "cpu"


def test_the_logger_writes_to_standard_output(capsys):
    from anyaccel.compat.deepspeed.utils import log_dist, logger, set_log_level_from_string
    from anyaccel.compat.deepspeed.utils.logging import should_log_le

    logger.warning("first")
    log_dist("too low", ranks=[0])
    logger.warning_once("only %s", "once")
    logger.warning_once("only %s", "once")
    assert logger.name == "DeepSpeed"
    assert not should_log_le("info")
    set_log_level_from_string("info")
    try:
        log_dist("now", ranks=[0])
        assert should_log_le("info")
    finally:
        set_log_level_from_string("warning")
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("] ")[2] for line in lines] == ["first", "only once", "now"]
    assert "[WARNING] [test_deepspeed_alias.py:" in lines[0]
    with pytest.raises(ValueError, match="'loud' is no level"):
        set_log_level_from_string("loud")
    assert logging.getLogger("DeepSpeed").handlers[0].stream is sys.stdout


def test_core_lists_as_the_documents_write_them():
    from anyaccel.compat.deepspeed.utils.numa import get_numa_cores, get_numactl_cmd, parse_range_list

    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    # The setup guide: 4 workers on 0-27,32-59 are 0-13, 14-27, 32-45 and 46-59.
    commands = [get_numactl_cmd("0-27,32-59", 4, rank) for rank in range(4)]
    assert [cores for cores, _ in commands] == [14] * 4
    assert [command[-2:] for _, command in commands] == [
        ["-C", "0-13"],
        ["-C", "14-27"],
        ["-C", "32-45"],
        ["-C", "46-59"],
    ]
    cores = get_numa_cores()
    assert cores
    assert get_numactl_cmd(None, 1, 0)[1][0] == "numactl"
    for text in ("2-1", "a", "0,0", "3,1-2", "1-2-3", ""):
        with pytest.raises(ValueError, match="Bad range"):
            parse_range_list(text)
    with pytest.raises(ValueError, match="too few for 4 ranks"):
        get_numactl_cmd("0-2", 4, 0)


def test_numactl_and_kmp_affinity_contradict_each_other(monkeypatch):
    from anyaccel.compat.deepspeed.utils.numa import get_numactl_cmd

    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match="unset KMP_AFFINITY"):
        get_numactl_cmd(None, 1, 0)


def test_ranges_of_the_profile():
    from anyaccel.compat.deepspeed.utils.nvtx import instrument_w_nvtx

    @instrument_w_nvtx
    def double(x):
        return 2 * x

    with torch.profiler.profile() as profile:
        assert double(2) == 4
    assert any("double" in event.key for event in profile.key_averages())


# launcher -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--bind_cores_to_rank x.py", "run --bind_cores_to_rank -- x.py"),
        ("--bind-core-list 0-1 x.py --bind 3", "run --bind_core_list=0-1 -- x.py --bind 3"),
        ("--num_gpus 2 --no_ssh_check x.py", "run --num_gpus=2 -- x.py"),
        ("-H h -i a@b:0 --launcher IMPI --master_addr 10.0.0.1 x.py",
         "run --hostfile=h --include=a@b:0 --master_addr=10.0.0.1 --launcher=IMPI -- x.py"),
        ("--enable_each_rank_log None --log_level critical -q x.py", "run --log_level=error --quiet -- x.py"),
        ("--enable_each_rank_log d --save_pid --module m -- a",
         "run --enable_each_rank_log=d --module --save_pid -- m -- a"),
    ],
)  # fmt: skip
def test_the_commands_options_become_those_of_anyaccel_run(given, expected):
    from anyaccel.cli.run import build_parser
    from anyaccel.compat.deepspeed.launcher import runner

    arguments = runner.anyaccel_arguments(runner.parse_args(given.split()))
    assert arguments == expected.split()
    build_parser().parse_args(arguments[1:])  # which knows them all


def test_every_option_of_the_command_is_known_to_anyaccel_run():
    """All of DeepSpeed's options, each with a value that is not its default."""
    from anyaccel.cli.run import build_parser
    from anyaccel.compat.deepspeed.launcher import runner

    options = {
        **dict.fromkeys(runner._WITH_VALUE, "7"),
        "bind_core_list": "0-1",
        "launcher": "slurm",
        "log_level": "error",
    }
    for others in (("include", "exclude"), ("num_nodes", "num_gpus")):  # which contradict each other
        given = [f"--{name}={value}" for name, value in options.items() if name not in others]
        given += [f"--{name}" for name in runner._SWITCHES]
        arguments = build_parser().parse_args(runner.anyaccel_arguments(runner.parse_args([*given, "x.py"]))[1:])
        assert arguments.launcher == "slurm"
        assert (arguments.num_accelerators == 7) == (arguments.include == "")
        assert arguments.command == ["--", "x.py"]


def test_autotuning_is_refused(capsys, monkeypatch):
    from anyaccel.compat.deepspeed.launcher import runner

    with pytest.raises(NotCoveredError, match="--autotuning is not covered"):
        runner.main(["--autotuning", "run", "x.py"])
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--autotuning", "run", "x.py"])
    with pytest.raises(SystemExit) as end:
        runner.main()
    assert end.value.code == 1
    assert "--autotuning is not covered" in capsys.readouterr().err


def test_hostfiles_and_filters(tmp_path):
    from anyaccel.compat.deepspeed.launcher import runner

    file = tmp_path / "hostfile"
    file.write_text("# a comment\nworker-0 slots=2\nworker-1 slots=4\n")
    pool = runner.fetch_hostfile(str(file))
    assert pool == {"worker-0": 2, "worker-1": 4}
    assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    chosen = runner.parse_inclusion_exclusion(pool, "worker-1:0,2@worker-0", "")
    assert chosen == {"worker-0": [0, 1], "worker-1": [0, 2]}
    assert list(chosen) == ["worker-0", "worker-1"]
    assert runner.parse_resource_filter({"a": [0, 1], "b": [0]}, exclude_str="a:0") == {"a": [1], "b": [0]}
    assert runner.parse_resource_filter({"a": [0, 1]}) == {"a": [0, 1]}
    assert runner.parse_node_config_list("w-0@w-1:2,0@w-1:1") == {"w-0": [], "w-1": [0, 1, 2]}
    assert runner.apply_num_nodes_and_gpus({"a": [0, 1], "b": [0, 1]}, 1, 1) == {"a": [0]}
    for include, exclude in (("c", ""), ("a:5", ""), ("a", "a"), ("a:x", "")):
        with pytest.raises(ValueError):
            runner.parse_resource_filter({"a": [0, 1]}, include, exclude)


@pytest.mark.parametrize(
    ("kind", "program"),
    [("OpenMPIRunner", "mpirun"), ("MPICHRunner", "mpiexec.hydra"), ("IMPIRunner", "mpiexec.hydra"),
     ("MVAPICHRunner", "mpiexec.hydra"), ("SlurmRunner", "srun")],
)  # fmt: skip
def test_runners_give_the_launchers_command(kind, program):
    from anyaccel.compat.deepspeed.launcher import multinode_runner, runner

    args = runner.parse_args(["--launcher_args=--verbose", "train.py", "--epochs", "3"])
    assert isinstance(args, argparse.Namespace)
    own = getattr(multinode_runner, kind)(args, runner.encode_world_info({"a": [0, 1]}), {"a": 2, "b": 2})
    own.add_export("MINE", "1")
    command = own.get_cmd({"PWD": "/tmp"}, {"a": [0, 1], "b": [0, 1]})
    assert command[0] == program
    assert command[-5:] == [sys.executable, "-u", "train.py", "--epochs", "3"]
    assert "--verbose" in command
    assert own.backend_exists() in (True, False)


def test_scripts_parse_deepspeeds_arguments():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "c.json"]).deepspeed_config == "c.json"


@pytest.mark.parametrize(
    ("policy", "flags"),
    [("bind", ["-m", "0,2"]), ("preferred", ["-p", "0,2"]), ("interleave", ["-i", "0,2"]), ("", [])],
)
def test_each_memory_policy_has_its_flag_of_numactl(policy, flags, monkeypatch):
    from anyaccel.compat.deepspeed.utils import numa

    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setattr(numa, "memory_policy", lambda machine, cores: (policy, (0, 2)))
    assert numa.get_numactl_cmd("0-3", 2, 1) == (2, ["numactl", *flags, "-C", "2-3"])


@pytest.mark.parametrize("cores", ["0-3", None])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 1), (2, 5), (1, -1), (0, 0), (-1, 0)])
def test_numactl_of_a_rank_that_is_not_there_is_an_error(cores, ranks, rank, monkeypatch):
    from anyaccel.compat.deepspeed.utils.numa import get_numactl_cmd

    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    with pytest.raises(ValueError, match=rf"local_rank={rank}|num_local_procs={ranks}"):
        get_numactl_cmd(cores, ranks, rank)


# Subgroups --------------------------------------------------------------------------------------------------


def test_a_subgroup_is_stepped_with_its_own_state_and_rolled_back():
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(1000, generator=generator), torch.randn(3, 1000, generator=generator)
    whole, param = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = module("deepspeed.ops.adam").DeepSpeedCPUAdam([whole], lr=0.01, weight_decay=0.1)
    optimizer = module("deepspeed.ops.adam").DeepSpeedCPUAdam([param], lr=0.01, weight_decay=0.1)
    with pytest.raises(RuntimeError, match="Cannot rollback optimizer state for sub_group_id 5"):
        optimizer.rollback_subgroup(5)
    seen = []
    for grad in grads:
        seen.append(param.detach().clone())
        whole.grad = param.grad = grad.clone()
        ours.step()
        assert optimizer.step_subgroup(5, lambda: "loss") == "loss"
        assert torch.equal(whole, param)
    assert optimizer.state[5]["step"] == 3 and param not in optimizer.state
    for before, grad in zip(reversed(seen), reversed(grads), strict=True):
        param.grad = grad.clone()
        optimizer.rollback_subgroup(5)
        torch.testing.assert_close(param.detach(), before, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="Cannot rollback sub_group_id 5: step count is 0"):
        optimizer.rollback_subgroup(5)
    half = nn.Parameter(start.bfloat16())
    half.grad = grads[0].bfloat16()
    optimizer = module("deepspeed.ops.adam").DeepSpeedCPUAdam([half])
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    torch.testing.assert_close(half.detach(), start.bfloat16(), rtol=0.02, atol=0.01)
    assert optimizer.state[0]["step"] == 0 and optimizer.state[0]["exp_avg"].abs().max() < 1e-6
    optimizer = module("deepspeed.ops.adam").DeepSpeedCPUAdam([half], adamw_mode=False)
    optimizer.step_subgroup(0)
    with pytest.raises(UsageError, match="undoes AdamW only"):
        optimizer.rollback_subgroup(0)
    assert optimizer.state[0]["step"] == 1


# Builders of other packages ---------------------------------------------------------------------------------


def test_a_builder_of_another_package_loads_up_to_its_compiler(tmp_path, monkeypatch):
    """As intel_extension_for_deepspeed's: what it imports, sources copied to DeepSpeed's folder, its own load()."""
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    base, info = module("deepspeed.ops.op_builder.builder"), module("deepspeed.git_version_info")
    assert tuple(map(int, torch.__version__.split(".")[:2])) == (base.TORCH_MAJOR, base.TORCH_MINOR)
    (tmp_path / "scale.cpp").write_text('extern "C" int scale() { return 2; }')

    class Builder(base.OpBuilder):
        NAME = "scale"

        def __init__(self):
            super().__init__(name=self.NAME)

        def absolute_name(self):
            return f"deepspeed.ops.{self.NAME}_op"

        def sources(self):
            copy = Path(self.deepspeed_src_path("third-party/csrc/scale.cpp"))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((tmp_path / "scale.cpp").read_bytes())
            return ["third-party/csrc/scale.cpp", "", "csrc/of/deepspeed.cpp"]

        def load(self, verbose=True):
            assert not info.installed_ops.get(self.name, False)
            return self.jit_load(verbose)

        def jit_load(self, verbose=True):
            if not self.is_compatible(verbose):
                raise RuntimeError(f"not compatible: {self.error_log}")
            self.jit_mode = True
            found = [Path(self.deepspeed_src_path(path)) for path in self.strip_empty_entries(self.sources())]
            assert [path.is_file() for path in found] == [True, False] and found[0].is_absolute()
            import no_such_compiler  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match="no_such_compiler"):
        Builder().load()
    assert Builder.mro()[1] is module("deepspeed.ops.op_builder").OpBuilder and not list(tmp_path.glob("*/third-party"))
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"not compatible: .*missing"):
        Builder().load()


def test_the_ops_that_there_are():
    compatible = module("deepspeed.ops").__compatible_ops__
    assert compatible is module("deepspeed.git_version_info").compatible_ops
    assert not module("deepspeed.git_version_info").installed_ops[
        "cpu_adam"
    ]  # no module deepspeed.ops.adam.cpu_adam_op
    assert compatible["cpu_adam"] and compatible["deepspeed_shm_comm"]
    assert module("deepspeed.git_version_info").version == deepspeed.__version__
    assert deepspeed.git_version_info.torch_info["version"] == ".".join(torch.__version__.split(".")[:2])


def test_init_distributed_that_is_not_to_start_wants_it_started():
    with pytest.raises(UsageError, match="dist_init_required=False"):
        deepspeed.init_distributed("shm", dist_init_required=False)


def test_memory_is_told_when_it_is_wanted(capsys):
    see_memory_usage = module("deepspeed.runtime.utils").see_memory_usage
    see_memory_usage("quiet")
    assert capsys.readouterr().out == ""
    kept = torch.ones(1 << 20)
    see_memory_usage("after loading", force=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "after loading"
    assert re.fullmatch(r"MA [\d.]+ GB +Max_MA [\d.]+ GB +CA [\d.]+ GB +Max_CA \d+ GB ", lines[1])
    told = re.fullmatch(r"CPU Virtual Memory:  used = ([\d.]+) GB, percent = ([\d.]+)%", lines[2])
    assert told is not None and float(told[1]) > 0 and 0 < float(told[2]) < 100
    assert kept.numel() == 1 << 20


def test_what_is_said_of_the_engine_helps_scripts_that_train_and_those_that_do_not():
    with pytest.raises(
        NotCoveredImportError, match=r"to train, use FSDP2 .*; to run a model, deepspeed\.init_inference"
    ):
        module("deepspeed.runtime.zero")
