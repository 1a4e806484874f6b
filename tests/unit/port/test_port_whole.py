# SPDX-License-Identifier: Apache-2.0
"""A file in which a question about CUDA stays keeps what it puts on a device, unless --partial is given."""

from pathlib import Path

import pytest

from anyaccel.port import run
from anyaccel.port.config import Config
from anyaccel.port.engine import port_text

NAME = "get_accelerator().device_name()"
PICK = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'
TENSOR = "def g(x):\n    if x.is_cuda:\n        return fast(x)\n    return x\n"


def lines(body: str) -> str:
    return f"import torch\n\n\ndef f(model, x):\n    {PICK}\n    model.to(device)\n\n\n{body}"


@pytest.mark.parametrize(
    "body",
    [
        TENSOR,
        "def encode(self, x):\n    if self.device == 'cuda':\n        x = move_to_cuda(x)\n    return x\n",
        "def g():\n    place_elsewhere('cuda:0')\n    return torch.cuda.ipc(x.cuda(d))\n",
    ],
)
def test_a_file_that_goes_on_asking_for_cuda_keeps_its_devices(body: str) -> None:
    text = lines(body)
    ported = port_text(text)
    assert PICK in ported.text
    told = next(each.message for each in ported.findings if each.code == "ACC111")
    assert "waits for `" in told and "ignore-cuda" in told and "--partial" in told
    assert f"device = torch.device({NAME})" in port_text(text, partial=True).text


@pytest.mark.parametrize(
    "body",
    [
        "def g(x):\n    x.cuda()\n",
        "def g(model):\n    if torch.cuda.device_count() > 1:\n        model = DataParallel(model)\n    return model\n",
        "def g():\n    if torch.cuda.is_available():\n        print(torch.cuda.get_device_name(0))\n",
    ],
)
def test_other_files_are_ported(body: str) -> None:
    assert f"device = torch.device({NAME})" in port_text(lines(body)).text


def test_a_question_that_is_to_stay_holds_nothing_back() -> None:
    text = lines(TENSOR.replace("is_cuda:", "is_cuda:  # ignore-cuda"))
    ported = port_text(text)
    assert f"device = torch.device({NAME})" in ported.text and "if x.is_cuda:  # ignore-cuda" in ported.text
    assert port_text(ported.text).text == ported.text


def test_what_places_nothing_is_ported_beside_it() -> None:
    text = lines(
        f"{TENSOR}\n\ndef h():\n    torch.manual_seed(1)\n    torch.cuda.manual_seed(1)\n"
        "    if torch.cuda.is_available():\n        torch.cuda.empty_cache()\n    torch.cuda.synchronize()\n"
    )
    ported = port_text(text).text
    assert "    get_accelerator().manual_seed(1)\n" in ported and "    get_accelerator().empty_cache()\n" in ported
    assert "    torch.cuda.synchronize()\n" in ported  # of a stream that the CPU's way has not


def test_a_value_that_only_cuda_understands_keeps_its_function() -> None:
    text = (
        "import torch\n\n\ndef f():\n    device = torch.cuda.current_device()\n"
        "    return torch.cuda.get_device_properties(device)\n"
    )
    assert port_text(text).text == text


@pytest.mark.parametrize(
    ("comment", "settled"),
    [("# ignore-cuda", True), ("# noqa", True), ("# noqa: ACC3", True), ("# noqa: E501", False)],
)
def test_a_comment_for_another_tool_settles_nothing_for_other_files(
    tmp_path: Path, comment: str, settled: bool
) -> None:
    files = write(tmp_path, {"model.py": GIVEN, "k.py": TENSOR.replace("is_cuda:", f"is_cuda:  {comment}")})
    assert (next(run.look_at_all(files)).after is not None) == settled


def write(folder: Path, files: dict[str, str]) -> list[tuple[str, Config]]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return [(str(folder / name), Config()) for name in files]


GIVEN = f"import torch\n\n\nclass Model:\n    def __init__(self):\n        self.{PICK}\n"


@pytest.mark.parametrize(
    ("question", "ported"), [(TENSOR, False), (TENSOR.replace("        return fast(x)", "        x.cuda()"), True)]
)
def test_a_device_for_other_code_stays_where_another_file_asks_for_cuda(
    tmp_path: Path, question: str, ported: bool
) -> None:
    files = write(
        tmp_path, {"a_model.py": GIVEN, "kernels.py": question.replace("    return x\n", ""), "z_model.py": GIVEN}
    )
    done = []
    outcomes = list(run.look_at_all(files, lambda: done.append(1)))
    assert [Path(each.path).name for each in outcomes] == ["a_model.py", "kernels.py", "z_model.py"]
    assert len(done) == 3
    changed = [each.after is not None for each in outcomes]
    assert changed == [ported, ported, ported]
    for each in outcomes:  # a second run finds what the first found
        if each.after is not None:
            Path(each.path).write_bytes(each.after)
    assert all(each.after is None for each in run.look_at_all(files))


def test_the_configuration_and_the_option_say_so(tmp_path: Path) -> None:
    files = [(path, Config(partial=True)) for path, _ in write(tmp_path, {"a.py": lines(TENSOR)})]
    (outcome,) = run.look_at_all(files)
    assert outcome.after is not None and f"torch.device({NAME})".encode() in outcome.after


def test_a_file_that_is_named_alone_is_ported_as_with_its_package(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    files = {
        "__init__.py": "",
        "own.py": "class Own:\n    def cuda(self):\n        return self\n",
        "kernels.py": TENSOR,
        "models/__init__.py": "",
        "models/a.py": GIVEN,
        "models/b.py": "import torch\nfrom own import Own\n\n\ndef f():\n    Own().cuda()\n",
    }
    write(tmp_path, files)
    alone = [next(run.look_at_all([(str(tmp_path / name), Config())])).after for name in files]
    whole = [each.after for each in run.look_at_all([(str(tmp_path / name), Config()) for name in files])]
    assert alone == whole
    assert whole == [None] * len(files)
    (tmp_path / "kernels.py").write_text(TENSOR.replace("is_cuda:", "is_cuda:  # ignore-cuda"))
    (waits,) = run.look_at_all([(str(tmp_path / "models/a.py"), Config())])
    assert waits.after is None and "`Own().cuda()` in b.py line 6, which stays" in waits.findings[0].message
    (tmp_path / "models/b.py").write_text(files["models/b.py"].replace(".cuda()", ".cuda()  # ignore-cuda"))
    (again,) = run.look_at_all([(str(tmp_path / "models/a.py"), Config())])
    assert again.after is not None


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nregister(name='cute', devices=('cuda',), path='x')\nx = 1\n",
        "import os\nimport torch\nwhere = os.environ\n"
        "if 'CUDA_VISIBLE_DEVICES' in os.environ and 'ROCR_VISIBLE_DEVICES' in where:\n    f()\n",
    ],
)
def test_what_is_said_of_cuda_and_rocm_themselves_stays(text: str) -> None:
    ported = port_text(text, partial=True)
    assert ported.text == text and ported.findings


def test_a_device_that_is_returned_under_a_name_is_for_other_code(tmp_path: Path) -> None:
    picked = (
        "import torch\n\n\ndef pick(cuda):\n    if cuda:\n        device = torch.device('cuda')\n    return device\n"
    )
    files = write(
        tmp_path, {"device.py": picked.replace("cuda):", "gpu):").replace("if cuda", "if gpu"), "k.py": TENSOR}
    )
    assert [each.after for each in run.look_at_all(files)] == [None, None]
    (tmp_path / "k.py").write_text("x = 1\n")
    assert next(run.look_at_all(files)).after is not None
