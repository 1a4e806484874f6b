# SPDX-License-Identifier: Apache-2.0
"""The command on files as they are: encodings, line ends, links, modes, notebooks, configuration, interruption."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from anyaccel.cli import main
from anyaccel.port import source
from anyaccel.port.config import PortConfig
from anyaccel.port.run import check_file, check_files

CODE = "import torch\n\ntorch.cuda.synchronize()\n"
PORTED = "import torch\nfrom anyaccel import get_accelerator\n\nget_accelerator().synchronize()\n"


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["port", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.py"
    path.write_text(CODE)
    return path


def test_check(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(file, "--check", capsys=capsys)
    finding, summary = out.splitlines()
    message = "ACC101 `torch.cuda.synchronize`; use `get_accelerator().synchronize` [fixable]"
    assert finding == f"{file}:3:1 {message}"
    assert summary == "found 1, 1 fixable with --write; 1 file"
    assert code == 1
    assert file.read_text() == CODE
    file.write_text(PORTED)
    assert run(file, capsys=capsys)[0] == 0


def test_diff(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(file, "--diff", capsys=capsys)
    assert code == 1
    assert out.startswith(
        f"--- {file}\n+++ {file}\n@@ -1,3 +1,4 @@\n import torch\n+from anyaccel import get_accelerator\n"
    )
    assert err == "would fix 1 in 1 file; 1 file\n"
    assert file.read_text() == CODE


def test_the_summary_names_the_option_for_unsafe_fixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.py"
    file.write_text('import torch\nfor d in ["cpu", "cuda"]:\n    pass\nx = torch.zeros(2).cuda()\n')
    assert "found 2, 1 fixable with --write, 1 more with --unsafe-fixes; 1 file" in run(tmp_path, capsys=capsys)[1]
    assert "would fix 1 in 1 file, 1 more with --unsafe-fixes; 1 file" in run(tmp_path, "--diff", capsys=capsys)[2]
    report = json.loads(run(tmp_path, "--json", capsys=capsys)[1])
    assert [each["tier"] for each in report["findings"]] == ["unsafe", "safe"]
    assert (report["summary"]["safe"], report["summary"]["unsafe"], report["summary"]["report"]) == (1, 1, 0)
    left = run(tmp_path, "--write", capsys=capsys)[1]
    assert "[fixable with --unsafe-fixes]\nfixed 1 in 1 file, 1 more with --unsafe-fixes, 0 left to you; 1 file" in left
    done = run(tmp_path, "--write", "--unsafe-fixes", capsys=capsys)[1]
    assert done == "fixed 1 in 1 file, 0 left to you; 1 file\n"


def test_write(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.chmod(0o754)
    code, out, _ = run(file.parent, "--write", capsys=capsys)
    assert (code, out) == (0, "fixed 1 in 1 file, 0 left to you; 1 file\n")
    assert file.read_text() == PORTED
    assert stat.S_IMODE(file.stat().st_mode) == 0o754
    before = file.stat()
    assert (
        run(file.parent, "--write", capsys=capsys)[1]
        == "fixed 0 in 0 files, 0 left to you; 1 file (1 without a word of CUDA)\n"
    )
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in file.parent.iterdir()] == ["a.py"]


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(file, "--json", capsys=capsys)
    report = json.loads(out)
    assert code == 1
    (finding,) = report["findings"]
    assert (finding["path"], finding["line"], finding["column"]) == (str(file), 3, 1)
    assert (finding["code"], finding["tier"], finding["fixed"]) == ("ACC101", "safe", False)
    assert report["rules"] == {"ACC101": {"safe": 1, "unsafe": 0, "report": 0}}
    assert report["summary"]["files"] == 1


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (CODE.replace("\n", "\r\n"), "utf-8"),
        ("\ufeff" + CODE, "utf-8"),
        ("# -*- coding: latin-1 -*-\n# \xe9\n" + CODE, "latin-1"),
        ("# vim: set fileencoding=shift_jis :\n# \u65e5\u672c\n" + CODE, "shift_jis"),
        ("# \u65e5\u672c \U0001f600\n" + CODE, "utf-8"),
        (CODE.removesuffix("\n"), "utf-8"),
        ("#!/usr/bin/env python3\n" + CODE, "utf-8"),
    ],
)
def test_encodings_and_line_ends_stay(tmp_path: Path, content: str, encoding: str) -> None:
    data = content.encode(encoding)
    path = tmp_path / "a.py"
    path.write_bytes(data)
    outcome = check_file(str(path), PortConfig())
    assert not outcome.error
    assert outcome.after is not None
    newline = "\r\n" if "\r\n" in content else "\r" if "\r" in content else "\n"
    line = f"from anyaccel import get_accelerator{newline}"
    expected = content.replace("torch.cuda.", "get_accelerator().").replace(
        "import torch" + newline, "import torch" + newline + line
    )
    assert outcome.after == expected.encode(encoding)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"import torch\ndef f(:\n    torch.cuda.x()\n", "a.py:2:"),
        (b"# cuda \xe9\n", "not valid utf-8, and no other encoding is declared"),
        (b"# cuda\n\n\n\n# \xe9\n", "not valid utf-8: invalid continuation byte"),
        (CODE.replace("\n", "\r").encode(), "would not be written back as it is"),
        (b"# coding: nonsense\ntorch.cuda\n", "unknown encoding: "),
        (b"# cuda\0\nimport torch\ntorch.cuda.synchronize()\0", "a.py:"),
        (b"x = " + b"(" * 5000 + b"torch.cuda" + b")" * 5000, "a.py"),
    ],
    ids=["syntax", "utf8", "utf8-later", "cr", "coding", "nul", "deep"],
)
def test_what_cannot_be_ported_is_one_line_and_the_rest_goes_on(
    tmp_path: Path, data: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "a.py", tmp_path / "b.py"
    bad.write_bytes(data)
    good.write_text(CODE)
    code, out, err = run(tmp_path, "--write", capsys=capsys)
    (line,) = err.splitlines()
    assert line.startswith(f"{bad}") and "not ported: " in line and reason in line
    assert code == 1
    assert out == "fixed 1 in 1 file, 0 left to you; 2 files; 1 path not ported\n"
    assert (bad.read_bytes(), good.read_text()) == (data, PORTED)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.chmod(0)
    assert "permission denied" in run(file, capsys=capsys)[2]


def test_links_and_loops(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "itself.py").symlink_to("itself.py")
    (tmp_path / "gone.py").symlink_to("nothing.py")
    (tmp_path / "linked.py").symlink_to("a.py")
    (tmp_path / "up").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    code, _, err = run(tmp_path, "--write", capsys=capsys)
    lines = sorted(line.removeprefix(f"{tmp_path}/") for line in err.splitlines())
    assert lines == [
        "gone.py: not ported: no such file or directory",
        "itself.py: not ported: too many levels of symbolic links",
        "pipe.py: left out: not a regular file",
        "up: left out: a symbolic link that leads back to a folder around it",
    ]
    assert code == 1
    assert file.read_text() == PORTED
    assert (tmp_path / "linked.py").is_symlink()


def test_a_link_given_stays_a_link(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "link.py"
    link.symlink_to("a.py")
    assert run(link, "--write", capsys=capsys)[0] == 0
    assert link.is_symlink() and file.read_text() == PORTED


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(tmp_path / "none.py", capsys=capsys)
    assert (code, err) == (1, f"{tmp_path}/none.py: not ported: no such file or directory\n")


def test_a_file_that_changed_meanwhile_is_left(file: Path) -> None:
    with pytest.raises(source.UnreadableError, match="has changed since"):
        source.write_bytes(str(file), b"new", seen=b"old")
    assert file.read_text() == CODE


def test_a_write_that_fails_leaves_the_file_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(source.UnreadableError, match="no space left on device"):
        source.write_bytes(str(file), b"new", seen=CODE.encode())
    assert file.read_text() == CODE
    assert [path.name for path in file.parent.iterdir()] == ["a.py"]


def test_fixes_that_could_not_be_written_are_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, out, err = run(file, "--write", capsys=capsys)
    assert code == 1
    assert "no space left on device" in err
    assert out.endswith("fixed 0 in 0 files, 0 left to you, 1 could not be written; 1 file; 1 path not ported\n")


def test_folders_that_are_not_looked_into(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (".git", ".venv", "__pycache__", "third"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "b.py").write_text(CODE)
    assert "found 2" in run(tmp_path, capsys=capsys)[1]
    assert "found 1" in run(tmp_path, "--exclude", "third", capsys=capsys)[1]
    assert "found 1" in run(tmp_path / ".venv", capsys=capsys)[1]
    assert "found 1," in run(file, tmp_path / "a.py", file, capsys=capsys)[1]


def test_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("import torch\nx.cuda()\ntorch.cuda.synchronize()\ntorch.cuda.utilization()\n")
    (tmp_path / "b.py").write_text(CODE)
    settings = tmp_path / "pyproject.toml"
    settings.write_text('[tool.anyaccel.port]\nselect = ["ACC1", "ACC501"]\nignore = ["ACC501"]\nexclude = ["b.py"]\n')
    assert "found 1," in run(tmp_path, capsys=capsys)[1]
    assert "found 2," in run(tmp_path / "a.py", "--ignore", "ACC3", capsys=capsys)[1]
    assert "ACC301" in run(tmp_path, "--select", "acc301", capsys=capsys)[1]
    code, out, err = run(tmp_path / "b.py", capsys=capsys)  # as pre-commit names files
    assert (code, out) == (0, "found nothing to port; 0 files\n")
    assert err == f"{tmp_path / 'b.py'}: left out: `exclude` names it\n"
    for text, told in (
        ("x = 1", "unknown key 'x'; there are select, ignore, exclude, unsafe-fixes"),
        ('select = "ACC1"', "select = 'ACC1' must be a list of strings"),
        ('ignore = ["ACC9"]', "no rule is or begins with 'ACC9'"),
    ):
        settings.write_text(f"[tool.anyaccel.port]\n{text}\n")
        from anyaccel.port import config

        config._find.cache_clear()
        code, _, err = run(tmp_path, capsys=capsys)
        assert code == 2
        assert told in err
    config._find.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no PATH is given"),
        (["x", "--select", "E501"], "--select: no rule is or begins with 'E501'"),
        (["x", "--check", "--write"], "not allowed with argument"),
    ],
)
def test_bad_usage(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(*arguments, capsys=capsys)
    assert code == 2
    assert told in err


def test_without_libcst(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    code, _, err = run(file, capsys=capsys)
    assert code == 1
    assert "pip install 'anyaccel[port]'" in err


def test_the_rules_are_listed_with_their_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("--rules", capsys=capsys)
    assert "ACC301  safe    .cuda() of tensors and modules\n" in out
    rules = json.loads(run("--rules", "--json", capsys=capsys)[1])["rules"]
    assert {each["tier"] for each in rules} == {"safe", "unsafe", "report"}
    assert all(each["why"] for each in rules)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom anyaccel.cli import main\n"
        f"main(['port', {str(tmp_path)!r}]); main(['port', '--rules'])\nimport anyaccel.cli\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110, stdout=subprocess.DEVNULL)


NOTEBOOK: dict[str, Any] = {
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# torch.cuda.synchronize()"]},
        {"cell_type": "code", "metadata": {}, "source": ["%pylab\n", "!nvidia-smi\n", "import torch"]},
        {"cell_type": "code", "metadata": {}, "source": "%%bash\necho cuda"},
        {"cell_type": "code", "metadata": {}, "source": ["if True:\n", "    %time 1\n", "x = x.cuda()"]},
        {"cell_type": "code", "metadata": {}, "source": "y = !ls\ntorch.cuda.synchronize()\n"},
        {"cell_type": "code", "metadata": {}, "source": ["broken ("]},
    ],
    "metadata": {"note": "\u00e9"},
    "nbformat": 4,
    "nbformat_minor": 5,
}  # fmt: skip


@pytest.mark.parametrize("layout", [{"indent": 1}, {"indent": None}, {"indent": 4, "ensure_ascii": False}])
def test_notebooks(tmp_path: Path, layout: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(NOTEBOOK, **layout) + "\n")
    code, out, _ = run(path, capsys=capsys)
    assert code == 1
    assert f"{path}:cell 4:3:5 ACC301" in out
    assert f"{path}:cell 5:2:1 ACC101" in out
    assert run(path, "--write", capsys=capsys)[0] == 0
    wanted = json.loads(json.dumps(NOTEBOOK))
    wanted["cells"][1]["source"].append("\n")
    wanted["cells"][1]["source"][2:] = ["import torch\n", "from anyaccel import get_accelerator"]
    wanted["cells"][3]["source"][2] = "x = x.to(get_accelerator().device_name())"
    wanted["cells"][4]["source"] = "y = !ls\nget_accelerator().synchronize()\n"
    assert json.loads(path.read_text()) == wanted
    assert path.read_text() == json.dumps(wanted, **layout) + "\n"
    assert "fixed 0" in run(path, "--write", capsys=capsys)[1]


def test_each_cell_of_a_notebook_that_imports_torch_imports_the_accelerator(tmp_path: Path) -> None:
    """Cells are run in any order: what ran without the first one before the port does so after it."""
    path = tmp_path / "a.ipynb"
    cells = [
        "import torch\ntorch.cuda.empty_cache()",
        "import torch\nimport os\nx = 1",
        "torch.cuda.empty_cache()",
        "y = 2",
    ]
    book = [{"cell_type": "code", "source": each} for each in cells]
    path.write_text(json.dumps({"cells": book, "metadata": {}, "nbformat": 4}))
    assert main(["port", str(path), "--write"]) == 0
    written = [each["source"] for each in json.loads(path.read_text())["cells"]]
    assert [each.count("from anyaccel import get_accelerator") for each in written] == [1, 1, 0, 0]
    assert written[1] == "import torch\nfrom anyaccel import get_accelerator\nimport os\nx = 1"
    assert written[2] == "get_accelerator().empty_cache()"
    before = path.read_text()
    assert main(["port", str(path), "--write"]) == 0
    assert path.read_text() == before


def book_of(*cells: str) -> str:
    return json.dumps(
        {"cells": [{"cell_type": "code", "source": each} for each in cells], "metadata": {}, "nbformat": 4}
    )


def test_a_cell_that_is_not_python_is_an_error_and_the_others_are_ported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(book_of("import torch\ntorch.cuda.empty_cache()", "if use:\n    model.cuda()\nloss = ", "x = "))
    code, _, err = run(path, "--write", capsys=capsys)
    assert code == 1
    assert "cell 2 is not Python, and CUDA is in it: invalid syntax (line 3)" in err
    assert "get_accelerator().empty_cache()" in path.read_text()


def test_magic_that_a_backslash_continues_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    shell = "if 1:\n    !python train.py \\\\\n      --device cuda \\\\\n    --steps 3\n".replace("\\\\", "\\")
    path.write_text(book_of("import torch\n" + shell + "torch.cuda.synchronize()"))
    assert main(["port", str(path), "--write"]) == 0
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["source"].endswith(shell + "get_accelerator().synchronize()")


def test_a_very_long_expression_leaves_the_other_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("import torch\nx = " + " + ".join(["torch.cuda.device_count()"] * 400) + "\n")
    (tmp_path / "b.py").write_text("import torch\ntorch.cuda.empty_cache()\n")
    _, _, err = run(tmp_path, "--write", capsys=capsys)
    assert "a.py" in err and "Traceback" not in err
    assert "get_accelerator().empty_cache()" in (tmp_path / "b.py").read_text()


@pytest.mark.parametrize("text", ["{cuda", '{"cells": 3, "x": "cuda"}', '["cuda"]', '{"cells": [{"cuda": 1}]}'])
def test_what_is_no_notebook(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(text)
    code, _, err = run(path, capsys=capsys)
    assert code == 1
    assert err.count("\n") == 1 and "not a notebook" in err


def test_many_files_in_workers_of_which_one_dies(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:02}.py" for number in range(12)]
    for path in files:
        path.write_text("x = 1\n" if path.name == "03.py" else CODE)
    code = f"""if True:
        import os, signal
        from anyaccel.port import run
        from anyaccel.port.config import PortConfig
        check, parent = run.check_file, os.getpid()
        def dies(path, config, own_cuda):
            assert os.getpid() != parent
            if path.endswith("07.py"):
                os.kill(os.getpid(), signal.SIGKILL)
            return check(path, config, own_cuda)
        run.check_file = dies
        for outcome in run.check_files([(path, PortConfig()) for path in {[str(path) for path in files]}], workers=2):
            print(outcome.path, outcome.error or f"{{outcome.parsed}} {{outcome.after is not None}}")
    """
    done = subprocess.run([sys.executable, "-c", code], timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    special = {"03.py": "False False", "07.py": "the process that looked at it died"}
    assert done.stdout.splitlines() == [f"{path} {special.get(path.name, 'True True')}" for path in files]


def test_where_threads_are_no_process_is_forked(tmp_path: Path) -> None:
    import threading

    (tmp_path / "a.py").write_text(CODE)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    outcomes = list(check_files([(str(tmp_path / "a.py"), PortConfig())] * 8, workers=2))
    ended.set()
    thread.join()
    assert [outcome.after for outcome in outcomes] == [PORTED.encode()] * 8


def test_an_interruption_at_any_line_of_a_write(tmp_path: Path) -> None:
    """Ctrl-C at the first, second, third... line that the write executes: the file is whole, and alone."""
    file = tmp_path / "file.py"
    lines = 0
    for number in range(1, 200):
        file.write_bytes(b"old")
        lines = 0

        def trace(frame: FrameType, event: str, _: object, number: int = number) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != source.__file__:
                return None
            lines += event == "line"
            if event == "line" and lines == number:
                signal.raise_signal(signal.SIGINT)
            return trace

        interrupted = False
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            source.write_bytes(str(file), b"new", b"old")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        assert [path.name for path in tmp_path.iterdir()] == ["file.py"], f"after line {number}"
        assert file.read_bytes() in (b"old", b"new")
        if lines < number:
            break
        assert interrupted, f"the one after line {number} was lost"
    assert 20 < lines < 199


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_whole_files(tmp_path: Path, number: int) -> None:
    body = "".join(f"def f{i}(x):\n    return x.cuda()\n\n\n" for i in range(40))
    for index in range(60):
        (tmp_path / f"{index}.py").write_text(f"import torch\n\n\n{body}")
    before = (tmp_path / "0.py").read_bytes()
    after = check_file(str(tmp_path / "0.py"), PortConfig()).after
    process = subprocess.Popen(
        [sys.executable, "-m", "anyaccel", "port", str(tmp_path), "--write"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and all(path.read_bytes() == before for path in tmp_path.glob("*.py")):
        time.sleep(0.02)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + signal.SIGTERM)
    assert "Traceback" not in err
    contents = {path.read_bytes() for path in tmp_path.iterdir()}
    assert contents == {before, after}
    assert len(list(tmp_path.iterdir())) == 60
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
