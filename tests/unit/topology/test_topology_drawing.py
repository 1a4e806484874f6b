# SPDX-License-Identifier: Apache-2.0
"""The drawings of `anyaccel topo`: text, JSON and SVG of every machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.report.topo import RankCores, arrange, short_list, size_text, to_dict
from anyaccel.report.topo_boxes import rank_colour, shortened
from anyaccel.report.topo_svg import render_svg
from anyaccel.report.topo_text import plain, render
from anyaccel.topology import Machine, parse_cpu_list, read_machine
from anyaccel.topology.details import Details, read_details
from sysfs_trees import MACHINES, Spec, build
from workers import memory_folder

pytestmark = pytest.mark.many_files

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", params=MACHINES)
def drawn(request: pytest.FixtureRequest) -> tuple[Machine, Details]:
    with memory_folder() as folder:
        build(MACHINES[request.param], Path(folder))
        machine = read_machine(folder)
        return machine, read_details(machine, folder)


def some_shares(machine: Machine) -> list[RankCores]:
    return [RankCores(rank, (cpu.id,), "memory of any node") for rank, cpu in enumerate(machine.cores()[:-1])]


def cells(text: str) -> str:
    """The characters that are cores, of the lines that have nothing else."""
    lines = (line.lstrip("│ ") for line in text.splitlines() if line.startswith(("│     ", "      ")))
    return "".join(line.replace(" ", "") for line in lines if not set(line) - set("■·x+ 0123456789abcdefghijklmnop"))


def test_everything_is_in_the_text_once_and_fits(drawn: tuple[Machine, Details]) -> None:
    machine, details = drawn
    for shares in ([], some_shares(machine)):
        text = render(machine, details, shares)
        assert max(map(len, text.splitlines())) <= 100
        for node in machine.nodes:
            if node.memory_bytes and not node.cpus and machine.nodes_with_cores().get(node.id) is None:
                assert text.count(f"node {node.id}: ") == 1
    allowed = set(machine.allowed_cpus)
    mine = {cpu.core for cpu in machine.cpus if cpu.id in allowed}
    drawn_cells = cells(render(machine, details))
    assert drawn_cells.count("■") == len(mine)
    assert len(drawn_cells) == len({cpu.core for cpu in machine.cpus})


def test_each_rank_is_drawn_where_its_cores_are(tmp_path: Path) -> None:
    build(MACHINES["two sockets"], tmp_path)
    machine = read_machine(tmp_path)
    shares = [RankCores(0, (0, 1, 2), "memory of node 0"), RankCores(1, (8, 24), "memory of node 1")]
    text = render(machine, read_details(machine, tmp_path), shares, ["left-over cores: 3-7, 9-15"])
    assert cells(text) == "000·····1·······"
    assert "memory of node 1\nleft-over cores: 3-7, 9-15\n" in text


def test_a_drawing_in_ascii(drawn: tuple[Machine, Details]) -> None:
    machine, details = drawn
    text = plain(render(machine, details))
    assert text.isascii()
    assert "?" not in text.replace(details.model_name, "")


def test_every_core_is_drawn_in_one_place(drawn: tuple[Machine, Details]) -> None:
    machine, details = drawn
    layout = arrange(machine, details)
    blocks = [block for section in layout.sections for block in section.blocks]
    cpus = [cpu.id for block in blocks for core in block.cores for cpu in core]
    assert sorted(cpus) == [cpu.id for cpu in machine.cpus]
    nodes = [node.id for block in blocks for node in (*block.nodes, *block.memory)]
    nodes += [node.id for node in (*layout.far_memory, *layout.empty)]
    assert sorted(nodes) == [node.id for node in machine.nodes]
    devices = [device for block in blocks for device in block.devices] + list(layout.far_devices)
    assert sorted(device.address for device in devices) == [device.address for device in details.devices]


def test_json_has_the_whole_model(drawn: tuple[Machine, Details]) -> None:
    machine, details = drawn
    found = json.loads(json.dumps(to_dict(machine, details)))
    assert [cpu["id"] for cpu in found["cpus"]] == [cpu.id for cpu in machine.cpus]
    assert [node["memory_bytes"] for node in found["nodes"]] == [node.memory_bytes for node in machine.nodes]
    assert len(found["caches"]) == len(details.caches)
    assert found["offline_cpus"] == list(details.offline_cpus)


def test_svg_is_valid_and_has_every_cpu(drawn: tuple[Machine, Details]) -> None:
    machine, details = drawn
    root = ET.fromstring(render_svg(machine, details, some_shares(machine)))
    assert root.tag == f"{SVG}svg"
    tips = [title.text or "" for title in root.iter(f"{SVG}title")]
    shown = sorted(int(tip.split()[1].rstrip(",")) for tip in tips if tip.startswith("CPU "))
    assert shown == [cpu.id for cpu in machine.cpus]
    assert not [e for e in root.iter() if any("href" in name for name in e.attrib)]  # self-contained


def test_svg_stays_inside_of_its_frame(drawn: tuple[Machine, Details]) -> None:
    machine, details = drawn
    root = ET.fromstring(render_svg(machine, details))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])

    def visit(element: ET.Element, left: float, top: float) -> None:
        place = element.get("transform", "translate(0 0)").removeprefix("translate(").rstrip(")").split()
        left, top = left + float(place[0]), top + float(place[1])
        if element.tag == f"{SVG}rect":
            assert left + float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 0.5
            assert top + float(element.attrib["y"]) + float(element.attrib["height"]) <= height + 0.5
        for child in element:
            visit(child, left, top)

    visit(root, 0, 0)


def draw(spec: Spec, root: Path, *shares: RankCores) -> str:
    build(spec, root)
    machine = read_machine(root)
    return render(machine, read_details(machine, root), shares)


def test_cells_show_ranks_and_what_is_not_theirs(tmp_path: Path) -> None:
    text = draw(
        Spec(cores=6, threads=2, allowed="0-4,6-10"),
        tmp_path,
        RankCores(0, (0, 1), "memory of node 0"),
        RankCores(11, (2, 7), "memory of any node"),
    )
    assert "      0+b··x\n" in text  # CPU 7 is the other thread of the core of CPU 1
    assert "rank  0: CPUs 0-1, memory of node 0\nrank 11: CPUs 2,7, memory of any node\n" in text
    for meaning in ("· given to nobody", "x a core that this process may not use", "+ a core of several ranks"):
        assert meaning in " ".join(text.split())


def test_two_sockets_of_56_cores_fit(tmp_path: Path) -> None:
    text = draw(MACHINES["two sockets of 56 cores"], tmp_path)
    assert len(text.splitlines()) < 25
    assert "CPUs 0-55; thread 2: 112-167" in text


def test_numbers_that_alternate_are_short(tmp_path: Path) -> None:
    assert "CPUs 0-14 step 2; thread 2: 16-30 step 2\n" in draw(MACHINES["interleaved"], tmp_path)


def test_fake_nodes_are_drawn_as_one(tmp_path: Path) -> None:
    assert "└─ nodes 0-3: 4 × 16.0 GiB, 8 cores, all with the same cores\n" in draw(MACHINES["fake numa"], tmp_path)


def test_a_cache_of_several_nodes_is_that_of_the_package(tmp_path: Path) -> None:
    text = draw(MACHINES["snc2"], tmp_path)
    assert "package 0: 8 cores, L3 105 MiB for all\n" in text
    assert "a core: L1d 48 KiB, L1i 32 KiB, L2 2 MiB\n" in text


def test_cores_that_share_a_cache_stand_together(tmp_path: Path) -> None:
    assert "      ■■■■ ■■■■\n" in draw(Spec(cores=8, l3=4), tmp_path)
    assert "      ■■■■■■■■ ■■■■ ■■■■\n" in draw(MACHINES["hybrid"], tmp_path / "hybrid")


def test_kinds_of_cores_have_caches_of_their_own(tmp_path: Path) -> None:
    text = " ".join(draw(MACHINES["hybrid"], tmp_path).split())
    assert "a performance core: L1d 48 KiB, L1i 32 KiB, L2 2 MiB; an efficiency core: L1d 32 KiB, L1i 32 KiB;" in text
    assert "2 × L2 4 MiB for 4 efficiency cores each; L3 105 MiB for all" in text


def test_a_core_alone_has_its_caches_for_itself(tmp_path: Path) -> None:
    assert "a core: L1d 48 KiB, L1i 32 KiB, L2 2 MiB, L3 105 MiB\n" in draw(Spec(cores=1), tmp_path)


def test_long_lists_do_not_make_the_picture_wide(tmp_path: Path) -> None:
    cpus = [cpu for cpu in range(224) if cpu % 7 in (0, 1, 4)]
    build(replace(MACHINES["two sockets of 56 cores"], allowed=",".join(map(str, cpus))), tmp_path)
    machine = read_machine(tmp_path)
    picture = render_svg(machine, read_details(machine, tmp_path), [RankCores(0, tuple(cpus), "memory of any node")])
    assert float(ET.fromstring(picture).attrib["width"]) < 1600
    assert shortened("1,2,3,4", 6) == "1,2,3…"


def test_a_name_from_a_recording_cannot_break_the_picture(tmp_path: Path) -> None:
    build(Spec(model="<b>\x01&\u001b[31m"), tmp_path)
    machine = read_machine(tmp_path)
    picture = render_svg(machine, read_details(machine, tmp_path))
    assert "<b> & [31m" in "".join(ET.fromstring(picture).itertext())


def test_ranks_have_colours_of_their_own() -> None:
    assert len({rank_colour(rank) for rank in range(64)}) == 64


@given(st.lists(st.integers(0, 60), unique=True))
def test_short_lists_lose_nothing(numbers: list[int]) -> None:
    back: list[int] = []
    for part in filter(None, short_list(numbers).replace(", ", ",").split(",")):
        span, _, step = part.partition(" step ")
        back += parse_cpu_list(span)[:: int(step or 1)]
    assert back == numbers


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, ""), (48 << 10, "48 KiB"), (1310720, "1.25 MiB"), (105 << 20, "105 MiB"), (64 << 30, "64.0 GiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert size_text(size) == text
