"""Lines that `bench comm` fits: kept beside what `plan --calibrate` wrote, and used by plans for groups like them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright.bench.comm_rows import Row, kept_lines
from meshwright.cluster.calibration import (
    calibration_file,
    read_calibration,
    write_calibration,
    write_lines,
)
from meshwright.cluster.cluster import parse_cluster
from meshwright.cluster.link_lines import LinkLine
from meshwright.models.presets import preset
from meshwright.planning.answer import plan
from meshwright.planning.corrections import basis_of
from meshwright.planning.links import Group, Links
from meshwright.planning.measured_links import MeasuredLinks, links_of
from meshwright.planning.origin import origin
from meshwright.planning.question import Question
from meshwright.planning.retune import slowed
from meshwright.planning.software import constants
from tests.unit.test_plan_calibration import calibration, speeds

COMMON = constants().common
MEBI = float(1 << 20)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def line(operation: str = "all_reduce", ranks: int = 8, inside: int = 8, **changes: object) -> LinkLine:
    values: dict[str, object] = {
        "operation": operation, "axis": "world", "ranks": ranks, "inside": inside, "node": 8, "backend": "nccl",
        "latency_s": 1e-3, "bandwidth": 1e9, "torch": "2.13.0", "when": "2026-02-03T04:05:06+00:00",
    }  # fmt: skip
    return LinkLine(**(values | changes))  # type: ignore[arg-type]


def links(*lines: LinkLine, cluster: str = "64xh200") -> Links:
    return links_of(replace(parse_cluster(cluster), lines=lines), COMMON)


def test_lines_make_a_file_of_their_own_and_are_added_to_one_that_is_there() -> None:
    path, ignored = write_lines("h200", [line()])
    assert (path, ignored) == (calibration_file("h200"), "")
    found, _ = read_calibration("h200")
    assert found is not None
    assert found.crowds == {}
    assert found.lines == (line(),)
    kept = calibration(_1=speeds(), _8=speeds(8))
    write_calibration(kept)
    write_lines("h200", [line()])
    assert read_calibration("h200") == (replace(kept, lines=(line(),)), "")


def test_a_newer_line_takes_the_place_of_one_about_the_same() -> None:
    write_lines("h200", [line(), line("all_gather")])
    newer = line(latency_s=2e-3, when="2026-03-03T04:05:06+00:00")
    write_lines("h200", [newer, line(axis="tp")])
    found, _ = read_calibration("h200")
    assert found is not None
    assert set(found.lines) == {newer, line("all_gather"), line(axis="tp")}


def test_files_from_before_lines_were_kept_are_read() -> None:
    path = write_calibration(calibration())
    table = json.loads(path.read_text())
    del table["lines"]
    path.write_text(json.dumps(table))
    assert read_calibration("h200") == (calibration(), "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"latency_s": float("nan")}, "nan is no latency_s"),
        ({"bandwidth": 0.0}, "0.0 bytes/s"),
        ({"ranks": 1, "inside": 1}, "1 ranks"),
        ({"inside": 9}, "9 in a machine"),
        ({"ranks": 2.5}, "2.5 is no ranks"),
        ({"operation": 3}, "3 is no operation"),
        ({"more": 3}, "more"),
        ({"bend": 1e6, "beyond": 0.0}, "0.0 bytes/s"),
        ({"bend": 1e6}, "None is no beyond"),
    ],
)
def test_a_damaged_line_makes_the_file_as_if_it_were_not_there_and_is_told(
    change: dict[str, object], said: str
) -> None:
    path = write_calibration(calibration())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lines": [asdict(line()) | change]}))
    cluster = parse_cluster("64xh200")
    assert cluster.speeds is None
    assert cluster.lines == ()
    assert said in cluster.measured
    # Who measures then starts anew, and says what is gone.
    _, ignored = write_lines("h200", [line()])
    assert said in ignored
    found, _ = read_calibration("h200")
    assert found is not None
    assert found.lines == (line(),)


def test_a_group_like_a_measured_one_takes_what_its_line_says() -> None:
    found = links(line(), line("all_gather", latency_s=2e-3), line("all_to_all"), line("send_receive"))
    eight = Group(8, 8)
    assert found.all_reduce(eight, MEBI) == pytest.approx(1e-3 + MEBI * 2 * 7 / 8 / 1e9)
    assert found.half(eight, MEBI) == pytest.approx(2e-3 + MEBI * 7 / 8 / 1e9)
    assert found.half(eight, MEBI, "reduce_scatter") == found.half(eight, MEBI), "the other half, until it is measured"
    assert found.exchange(eight, MEBI) == pytest.approx(1e-3 + MEBI * 7 / 8 / 1e9)
    # A message of a ring of eight grows with its bytes as one between two does.
    assert found.send(2 * MEBI, far=False) - found.send(MEBI, far=False) == pytest.approx(MEBI / 1e9)
    assert found.all_reduce(Group(1, 1), MEBI) == found.half(eight, 0.0) == 0.0


def test_a_line_may_bend() -> None:
    bent = line("send_receive", 2, 2, bend=MEBI, beyond=5e8)
    found = links(bent)
    assert found.send(MEBI, far=False) == pytest.approx(1e-3 + MEBI / 1e9)
    assert found.send(3 * MEBI, far=False) == pytest.approx(1e-3 + MEBI / 1e9 + 2 * MEBI / 5e8)
    slower = links(bent.slower(2))
    assert slower.send(3 * MEBI, far=False) == pytest.approx(1e-3 + 2 * MEBI / 1e9 + 4 * MEBI / 5e8)
    write_lines("h200", [bent])
    kept, _ = read_calibration("h200")
    assert kept is not None
    assert kept.lines == (bent,)


def test_lines_from_before_bends_were_found_are_read() -> None:
    path, _ = write_lines("h200", [line()])
    table = json.loads(path.read_text())
    for row in table["lines"]:
        del row["bend"], row["beyond"]
    path.write_text(json.dumps(table))
    found, ignored = read_calibration("h200")
    assert (found is not None and found.lines, ignored) == ((line(),), "")


def test_links_between_machines_are_measured_apart_from_those_inside() -> None:
    plain, slow = links(), line(ranks=16, bandwidth=1e7)
    found = links(slow)
    assert found.all_reduce(Group(16, 8), MEBI) == pytest.approx(1e-3 + MEBI * 2 * 15 / 16 / 1e7)
    assert found.all_reduce(Group(8, 8), MEBI) == plain.all_reduce(Group(8, 8), MEBI), "nothing was measured inside"
    assert found.half(Group(16, 8), MEBI) == pytest.approx(found.all_reduce(Group(16, 8), MEBI) / 2)
    assert found.send(MEBI, far=True) == plain.send(MEBI, far=True), "no message was measured"


def test_other_groups_take_what_the_nearest_line_carries_over_to_them() -> None:
    found = links(line(ranks=2, inside=1, bandwidth=1e8), line(ranks=8))
    # Twice the machines: more of it leaves each, (m-1)/m, in one more step.
    two, four = Group(2, 1), Group(4, 1)
    assert found.all_reduce(two, MEBI) == pytest.approx(1e-3 + MEBI / 1e8)
    assert found.all_reduce(four, MEBI) == pytest.approx(1.5e-3 + 1.5 * MEBI / 1e8)
    # Eight of each machine share what leaves it.
    assert found.all_reduce(Group(16, 8), 8 * MEBI) == pytest.approx(found.all_reduce(two, MEBI))
    assert found.all_reduce(Group(4, 4), MEBI) == pytest.approx(0.75e-3 + 1.5 * MEBI / 1e9)
    both = links(line(ranks=4, inside=4), line(ranks=4, inside=4, node=4, bandwidth=1e8), cluster="16x4xh200")
    assert both.all_reduce(Group(4, 4), MEBI) == pytest.approx(1e-3 + 1.5 * MEBI / 1e8), "with as many on a machine"


def test_plans_use_the_lines_of_the_backend_that_trains_and_say_so() -> None:
    def seconds() -> float:
        shown = plan("llama3.1-8b", "64xh200", sequence_length=4096, global_batch=512, strategy="dp=64 zero=3").shown
        return shown.parts.dp

    before = seconds()
    write_lines("h200", [line("all_gather", ranks=64, bandwidth=1e8, backend="gloo")])
    assert seconds() == before
    cluster = parse_cluster("64xh200")
    assert cluster.lines == ()
    basis = basis_of(cluster)
    write_lines("h200", [line("all_gather", ranks=64, bandwidth=1e8)])
    assert seconds() > 5 * before
    cluster = parse_cluster("64xh200")
    assert basis_of(cluster) != basis, "what was learned under other estimates is not carried over"
    said = origin(Question(preset("llama3.1-8b"), cluster, 4096, 512))
    assert "links measured here on 2026-02-03 by bench comm (groups of 8 x 8 ranks)" in said
    write_calibration(replace(calibration(), lines=cluster.lines))
    said = origin(Question(preset("llama3.1-8b"), parse_cluster("64xh200"), 4096, 512))
    assert said.startswith("times of computing calibrated on somewhere, 2026-01-02, torch 2.13.0; links measured here")


def test_a_run_that_saw_slower_links_slows_the_measured_ones() -> None:
    cluster = replace(parse_cluster("64xh200"), lines=(line(), line(ranks=64)))
    slower = slowed(cluster, 1.0, 4.0)
    assert [one.bandwidth for one in slower.lines] == [1e9, 0.25e9], "those that its groups cross"
    inside = slowed(replace(cluster, gpus=8), 1.0, 4.0)
    assert [one.bandwidth for one in inside.lines] == [0.25e9, 1e9]


def test_only_lines_that_show_a_bandwidth_are_kept() -> None:
    def rows(sizes: tuple[int, ...], bandwidth: float = 1e9) -> list[Row]:
        return [
            Row("all_reduce", "dp", 4, 2, size, size // 4, "float32", 1e-3 + 1.5 * size / bandwidth, 20, 0, 2, 4)
            for size in sizes
        ]

    kept, left = kept_lines(rows((8, 1 << 20, 1 << 24)), "gloo", "2.13.0", "2026-02-03")
    assert left == []
    (one,) = kept
    assert one.key == ("all_reduce", "dp", 4, 2, 4, "gloo")
    assert (one.latency_s, one.bandwidth) == (pytest.approx(1e-3), pytest.approx(1e9))
    nothing = ([], ["all_reduce over dp"])
    assert kept_lines(rows((8, 1 << 17)), "gloo", "2.13.0", "2026-02-03") == nothing, "mostly latency"
    assert kept_lines(rows((8, 32), 1e3), "gloo", "2.13.0", "2026-02-03") == nothing, "bytes so few may be noise"


def test_what_was_measured_within_a_machine_says_nothing_about_the_network() -> None:
    """Also where it had more ranks than the machines of a plan have."""
    plain, measured = links(cluster="4x4xh100"), links(line(ranks=8, inside=8), cluster="4x4xh100")
    for group in (Group(8, 4), Group(4, 1), Group(16, 4)):
        assert measured.all_reduce(group, MEBI) == plain.all_reduce(group, MEBI)
    assert measured.all_reduce(Group(4, 4), MEBI) != plain.all_reduce(Group(4, 4), MEBI)


def test_machines_that_share_a_domain_of_fast_links_are_one() -> None:
    wide = parse_cluster("64xgb200")
    assert wide.domain > wide.node
    found = links_of(replace(wide, lines=(line(ranks=8, inside=wide.node, node=wide.node),)), COMMON)
    assert isinstance(found, MeasuredLinks)
    assert found.all_reduce(Group(8, 8), MEBI) == pytest.approx(1e-3 + MEBI * 2 * 7 / 8 / 1e9)
