# SPDX-License-Identifier: Apache-2.0
"""Which variables travel to other hosts, and from where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.accelerator.select import REGISTRY
from anyaccel.errors import UsageError
from anyaccel.launch.cluster.environment import PREFIXES, forwarded_environment, parse_environment_file


def travels(name):
    return name in forwarded_environment({name: "x"})


TRAVELLING = (
    "NCCL_DEBUG CCL_LOG_LEVEL FI_PROVIDER I_MPI_FABRICS UCX_TLS GLOO_SOCKET_IFNAME OMP_NUM_THREADS KMP_BLOCKTIME "
    "GOMP_SPINCOUNT MKL_NUM_THREADS DNNL_VERBOSE ONEDNN_VERBOSE PYTHONPATH PYTHONUTF8 TORCH_LOGS PYTORCH_ALLOC_CONF "
    "HF_HOME TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM MLFLOW_TRACKING_URI DS_ACCELERATOR ANYACCEL_CACHE_DIR "
    "LD_LIBRARY_PATH PATH MV2_DEBUG CUDA_HOME CUDA_DEVICE_MAX_CONNECTIONS VIRTUAL_ENV"
)
STAYING = (
    "HOME USER SHELL PWD TMPDIR DISPLAY SSH_AUTH_SOCK SSH_CONNECTION HOSTNAME PMI_RANK PMIX_RANK OMPI_COMM_WORLD_RANK "
    "OMPI_MCA_ess SLURM_PROCID SLURM_JOB_ID RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT MPI_LOCALRANKID "
    "TORCHELASTIC_RUN_ID MV2_COMM_WORLD_RANK I_MPI_HYDRA_UUID CUDA_VISIBLE_DEVICES ZE_AFFINITY_MASK PYTHONSTARTUP "
    "HF_TOKEN WANDB_API_KEY MLFLOW_TRACKING_PASSWORD LS_COLORS LD_PRELOAD BASH_FUNC_PATH%%"
)


@pytest.mark.parametrize("name", TRAVELLING.split())
def test_these_travel(name):
    assert travels(name)


@pytest.mark.parametrize("name", STAYING.split())
def test_these_do_not_travel(name):
    assert not travels(name)


def test_what_a_backend_wants_to_travel_does_and_its_visible_devices_do_not():
    specs = [entry.load().spec for entry in REGISTRY if entry.target.startswith("anyaccel.")]
    assert len(specs) > 10
    known = tuple(prefix for group in PREFIXES.values() for prefix in group)
    for spec in specs:
        assert all(prefix.startswith(known) for prefix in spec.export_prefixes), spec.name
        assert not any(travels(variable) for variable in spec.visible_devices), spec.name


def test_no_value_is_changed_and_names_are_sorted():
    value = " a 'b' \"c\" $d `e` \n\\ ä \udcff ="
    assert list(forwarded_environment({"NCCL_B": value, "CCL_A": ""}).items()) == [("CCL_A", ""), ("NCCL_B", value)]


def test_a_file_wins_over_the_environment_the_current_folder_over_home_and_export_over_all(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / ".deepspeed_env").write_text("A=home-ds\nB=home-ds\nC=home-ds\nD=home-ds\nNCCL_E=home-ds\nF=home-ds\n")
    (home / ".anyaccel_env").write_text("B=home\nC=home\nD=home\n")
    (here / ".deepspeed_env").write_text("C=here-ds\nD=here-ds\n")
    (here / ".anyaccel_env").write_text("D=here\n")
    found = forwarded_environment(
        {"NCCL_E": "launcher", "G": "g", "H": "h", "UNRELATED": "u"},
        ["F=export", "G", "EMPTY=", "SUM=a=b"],
        [str(here), str(home), str(tmp_path / "none")],
    )
    assert found == {
        "A": "home-ds",
        "B": "home",
        "C": "here-ds",
        "D": "here",
        "NCCL_E": "home-ds",
        "F": "export",
        "G": "g",
        "EMPTY": "",
        "SUM": "a=b",
    }


def test_ds_env_file_names_the_file(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    (tmp_path / "other").write_text("B=2\n")
    assert forwarded_environment({"DS_ENV_FILE": "other"}, [], [str(tmp_path)]) == {"B": "2"}
    assert forwarded_environment({"DS_ENV_FILE": str(tmp_path / "other")}, [], ["/", "/tmp"]) == {"B": "2"}


def test_a_secret_travels_when_asked_for():
    assert forwarded_environment({"HF_TOKEN": "t"}, ["HF_TOKEN"]) == {"HF_TOKEN": "t"}


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ("NOT_SET", "--export NOT_SET: it is not set here; set it, or write --export NOT_SET=VALUE"),
        ("a b=1", "--export 'a b=1': 'a b' is not the name of a variable"),
        ("", "'' is not the name of a variable"),
        ("1A=1", "'1A' is not the name"),
        ("RANK=1", "the launcher gives each worker a RANK of its own"),
        ("PMI_RANK", "the launcher gives each worker a PMI_RANK of its own"),
        ("MASTER_ADDR=a", "MASTER_ADDR is given by the launcher; use --master_addr"),
    ],
)
def test_a_mistake_in_export(export, message):
    with pytest.raises(UsageError) as caught:
        forwarded_environment({"PMI_RANK": "0"}, [export])
    assert message in str(caught.value)


ENVIRON = {"HOME": "/h"}


def test_the_grammar_of_a_file():
    text = (
        "# comment\n\n"
        "PLAIN=a b  \r\n"
        "  export EXPORTED=1\n"
        "export\tTAB=1\n"
        "EMPTY=\n"
        "COMMENT=a # b\n"
        "ONLY=# b\n"
        "HASH=a#b\n"
        "EQUALS=a=b=c\n"
        "HOME_IS=$HOME/x\n"
        "PATHS=/a:${HOME}:$NONE_SUCH:$HOME_IS\n"
        "DOLLARS=$ $1 ${a b} ${HOME $$HOME\n"
        'BETWEEN="a $HOME/${HOME}b $"\n'
        "SINGLE='a \"b\" \\ # $c'  # d\n"
        'DOUBLE="a \'b\' \\"c\\" \\\\ \\$d \\n # e"\n'
        "NONE=''\n"
        "exported=lower\n"
        "SPACED = a\n"
        "LAST=1\n"
        "LAST=2"
    )
    assert parse_environment_file(text, "f", ENVIRON) == {
        "PLAIN": "a b",
        "EXPORTED": "1",
        "TAB": "1",
        "EMPTY": "",
        "COMMENT": "a",
        "ONLY": "",
        "HASH": "a#b",
        "EQUALS": "a=b=c",
        "HOME_IS": "/h/x",
        "PATHS": "/a:/h::/h/x",
        "DOLLARS": "$ $1 ${a b} ${HOME $/h",
        "BETWEEN": "a /h//hb $",
        "SINGLE": 'a "b" \\ # $c',
        "DOUBLE": "a 'b' \"c\" \\ $d \\n # e",
        "NONE": "",
        "exported": "lower",
        "SPACED": "a",
        "LAST": "2",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nB\n", "f:2: 'B' sets no variable; write NAME=VALUE"),
        ("export\n", "f:1: 'export' sets no variable"),
        ("=1", "f:1: '' is not the name of a variable"),
        ("A-B=1", "f:1: 'A-B' is not the name"),
        ("A='1", "f:1: the quote ' is not closed in this line"),
        ('A="1\\"', 'f:1: the quote " is not closed'),
        ("A='1'2", "f:1: '2' follows the closing quote; put the whole value into quotes"),
        ("A='1'#2", "f:1: '#2' follows the closing quote"),
        ("A=\0", "f:1: the value of A has a NUL byte"),
        ("RANK=0", "f:1: the launcher gives each worker a RANK of its own"),
        ("MASTER_PORT=1", "f:1: MASTER_PORT is given by the launcher; use --master_port"),
    ],
)
def test_a_mistake_in_a_file_names_its_line(text, message):
    with pytest.raises(UsageError) as caught:
        parse_environment_file(text, "f", ENVIRON)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / ".anyaccel_env").mkdir()
    with pytest.raises(UsageError, match=r"environment file '.*/\.anyaccel_env' cannot be read: Is a directory"):
        forwarded_environment({}, [], [str(tmp_path)])


@given(st.text(st.characters(exclude_characters="\n\0", exclude_categories=("Cs",))))
def test_any_value_can_be_written_in_double_quotes(value):
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    assert parse_environment_file(f'A="{escaped}"', "f", ENVIRON) == {"A": value}


@given(st.text())
def test_any_text_is_a_file_or_one_line_of_an_error(text):
    try:
        found = parse_environment_file(text, "f", ENVIRON)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(value, str) for value in found.values())
