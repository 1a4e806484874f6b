# SPDX-License-Identifier: Apache-2.0
"""`anyaccel compat` in an environment of the test's own: what is written, what is refused, what stays."""

import json
import subprocess

import pytest

from anyaccel import compat
from anyaccel.cli import main
from environments import PYTHON, Environment


class CompatEnvironment(Environment):
    def compat(self, action, *options, **more):
        return self.run("python", "-m", "anyaccel", "compat", action, *options, DS_ACCELERATOR="cpu", **more)


@pytest.fixture
def environment(tmp_path):
    return CompatEnvironment(tmp_path / "env")


def test_install_and_remove_leave_the_environment_as_it_was(environment):
    assert "there is none" in environment.compat("status", code=1)
    said = environment.compat("install")
    added = {
        f"lib/{PYTHON}/site-packages/anyaccel-compat.json",
        f"lib/{PYTHON}/site-packages/anyaccel-compat.pth",
        "bin/deepspeed",
        "bin/ds_report",
    }
    assert environment.files() - environment.before == added
    assert "import deepspeed is anyaccel's now" in said
    where = environment.run("python", "-c", "import deepspeed, sys; print(deepspeed.__file__, 'torch' in sys.modules)")
    assert where.split() == [str(compat.ALIAS_ROOT / "deepspeed" / "__init__.py"), "False"]
    state = json.loads(environment.compat("status", "--json"))
    assert state["installed"]
    assert set(state["files"].values()) == {"ours"}
    assert "nothing to do" in environment.compat("install")
    environment.compat("remove")
    assert environment.files() == environment.before
    assert "nothing to do" in environment.compat("remove")


def test_what_is_missing_is_written_again(environment):
    environment.compat("install")
    (environment.bin / "deepspeed").unlink()
    assert "incomplete" in environment.compat("status", code=1)
    assert environment.compat("install").splitlines()[0] == f"wrote {environment.bin / 'deepspeed'}"


@pytest.mark.parametrize("name", ["bin/deepspeed", f"lib/{PYTHON}/site-packages/anyaccel-compat.pth"])
def test_a_file_of_somebody_else_is_never_overwritten(environment, name):
    theirs = environment.folder / name
    theirs.write_text("# theirs\n")
    said = environment.compat("install", code=1)
    assert f"{theirs} is not of anyaccel, so it is not overwritten" in said
    assert theirs.read_text() == "# theirs\n"
    assert environment.files() - environment.before <= {name}


def test_what_was_changed_since_stays(environment):
    environment.compat("install")
    script = environment.bin / "ds_report"
    script.write_text("# changed\n")
    assert "was changed by somebody" in environment.compat("install", code=1)
    assert f"left as it is: {script}" in environment.compat("remove")
    assert environment.files() - environment.before == {"bin/ds_report"}


def real_deepspeed(site):
    (site / "deepspeed").mkdir()
    (site / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.8'\n")


def test_refuses_where_the_real_deepspeed_is(environment):
    real_deepspeed(environment.site)
    said = environment.compat("install", code=1)
    assert f"DeepSpeed is installed ({environment.site}/deepspeed/__init__.py)" in said
    assert "anyaccel run --as-deepspeed" in said
    assert not (environment.bin / "deepspeed").exists()


def test_refuses_where_the_real_deepspeed_is_known_to_pip_only(environment):
    """As with an editable install, which an import hook finds."""
    info = environment.site / "deepspeed-0.19.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    assert "DeepSpeed is installed (version 0.19.8" in environment.compat("install", code=1)


def test_a_folder_called_deepspeed_where_the_user_stands_does_not_count(environment):
    real_deepspeed(environment.folder)
    environment.compat("install")


def test_deepspeed_that_is_installed_later_is_told_and_can_be_freed(environment):
    environment.compat("install")
    real_deepspeed(environment.site)
    assert "(not anyaccel)" in environment.compat("status", code=1)
    environment.compat("remove")
    assert (environment.site / "deepspeed" / "__init__.py").exists()


def test_a_failure_on_the_way_leaves_nothing(environment):
    said = environment.run(
        "python", "-c",
        "import anyaccel.compat as c\n"
        "real = c._write\n"
        "def fail(path, *a, **k):\n"
        "    if path.name == 'ds_report': raise OSError(28, 'No space left on device')\n"
        "    real(path, *a, **k)\n"
        "c._write = fail\n"
        "try: c.install()\n"
        "except OSError as e: print(e)",
    )  # fmt: skip
    assert "No space left" in said
    assert environment.files() == environment.before


def test_an_alias_that_python_would_not_find_is_taken_away_again(environment):
    said = environment.run(
        "python", "-c",
        "import anyaccel.compat as c\n"
        "c._found_by_new_python = lambda: None\n"
        "try: c.install()\n"
        "except c.CompatError as e: print(e)",
    )  # fmt: skip
    assert "a new Python would import deepspeed from nowhere" in said
    assert environment.files() == environment.before


def test_two_at_once_are_one(environment):
    command = [str(environment.bin / "python"), "-m", "anyaccel", "compat", "install"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0] * 3, outputs
    assert sum("wrote" in out for out, _ in outputs) == 1


def test_a_damaged_record_is_one_line(environment):
    (environment.site / compat.RECORD).write_text("{")
    said = environment.compat("status", code=1)
    assert "is damaged" in said
    assert len(said.splitlines()) == 1


def test_an_environment_whose_path_has_a_space(tmp_path):
    environment = CompatEnvironment(tmp_path / "my env")
    environment.compat("install")
    assert "usage: deepspeed" in environment.run("deepspeed", "--help")


def test_variables_of_one_job_come_first():
    assert compat.job_environment({"PYTHONPATH": "/a:/b"}) == {"PYTHONPATH": f"{compat.ALIAS_ROOT}:/a:/b"}
    assert compat.job_environment({}) == {"PYTHONPATH": str(compat.ALIAS_ROOT)}


def test_bad_usage_is_one_line(capsys):
    assert main(["compat", "instal"]) == 2
    assert "invalid choice: 'instal'" in capsys.readouterr().err
