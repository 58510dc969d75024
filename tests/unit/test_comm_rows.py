"""Collectives as nccl-tests prints them, and lines through their times."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.bench import comm
from meshwright.bench.collectives import OPERATIONS
from meshwright.bench.comm_rows import Row, lines_through, parse_size, sizes
from meshwright.cli.bench_comm import COLLECTIVES, DTYPES
from meshwright.comm.algorithms import ALGORITHMS
from meshwright.comm.bandwidth import Line
from meshwright.comm.fitted_line import fit, fit_bent
from meshwright.comm.travel import BACKEND, Travel
from meshwright.config import CommSection
from meshwright.errors import UserError


def row(operation: str = "all_reduce", ranks: int = 8, size: int = 8388608, seconds: float = 1243.2e-6) -> Row:
    return Row(operation, "world", ranks, 1, size, size // 4, "float32", seconds, 20, 0, 8, 8)


def test_known_values_are_printed_as_nccl_tests_prints_them() -> None:
    assert str(row()).split() == ["8388608", "2097152", "float32", "1243.2", "6.75", "11.81", "0", "N/A"]
    assert row("all_gather").bus_gb_s == pytest.approx(6.7476 * 7 / 8, rel=1e-4)
    assert row("broadcast").bus_gb_s == row("send_receive").bus_gb_s == row().algorithm_gb_s


def test_sizes_grow_by_a_factor() -> None:
    assert sizes("8", "128M", 2) == [8 << power for power in range(25)]
    assert sizes("1K", "1K", 2) == [1024]
    assert sizes("8", "100", 4) == [8, 32]
    assert [parse_size(text) for text in ("8", "64k", "1MiB", "2G")] == [8, 1 << 16, 1 << 20, 1 << 31]


@pytest.mark.parametrize("given", [("x", "1M", 2), ("8", "1M", 1), ("1M", "8", 2), ("0", "8", 2), ("8", "1.5M", 2)])
def test_sizes_that_make_no_sense_are_refused(given: tuple[str, str, int]) -> None:
    with pytest.raises(UserError):
        sizes(*given)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency: float, bandwidth: float) -> None:
    points = [(float(size), latency + size / bandwidth) for size in sizes("8", "128M", 2)]
    found = fit(points)
    assert found is not None
    assert found.seconds(1 << 20) == pytest.approx(latency + (1 << 20) / bandwidth, rel=1e-6)
    assert found.latency_s == pytest.approx(latency, rel=1e-3, abs=1e-9)


def test_a_line_never_promises_less_than_nothing() -> None:
    assert fit([(8.0, 1.0)]) is None
    falling = fit([(8.0, 2.0), (1024.0, 1.0)])
    assert falling is not None
    assert falling.seconds(1 << 30) > 0
    steep = fit([(8.0, 1e-9), (1024.0, 1.0)])
    assert steep is not None
    assert steep.latency_s >= 0


@pytest.mark.parametrize("beyond", [0.5, 3.0])
def test_a_bend_is_found_where_it_is(beyond: float) -> None:
    bent = Line(1e-3, 1e7, float(1 << 20), 1e7 * beyond)
    noise = [1.02, 0.98, 1.0, 1.03, 0.97, 1.01, 0.99, 1.02]
    points = [(float(size), bent.seconds(size) * off) for size, off in zip(sizes("64K", "8M", 2), noise, strict=True)]
    found = fit_bent(points)
    assert found is not None
    assert found.bend == 1 << 20
    assert found.beyond == pytest.approx(bent.beyond, rel=0.05)
    assert found.seconds(3 << 20) == pytest.approx(bent.seconds(3 << 20), rel=0.05)
    straight = fit(points)
    assert straight is not None
    assert straight.bend is None


def test_noise_is_no_bend() -> None:
    draw = random.Random(5)
    for _ in range(50):
        points = [(float(size), (1e-3 + size / 1e7) * draw.uniform(0.9, 1.1)) for size in sizes("64K", "8M", 2)]
        found = fit_bent(points)
        assert found is not None
        assert found.seconds(16 << 20) == pytest.approx(1e-3 + (16 << 20) / 1e7, rel=0.2)


def test_a_bend_takes_two_sizes_on_each_side() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0), (8.0, 40.0)]
    found = fit_bent(points)
    assert found is not None
    assert found.bend != 4.0


def test_each_operation_and_axis_has_a_line() -> None:
    names = ["all_reduce", "broadcast"]
    rows = [row(name, size=size, seconds=1e-3 + size / 1e9) for name in names for size in (8, 1 << 20)]
    assert [one.operation for one, _ in lines_through(rows)] == names


def test_the_command_line_knows_what_can_be_measured() -> None:
    assert tuple(OPERATIONS) == COLLECTIVES
    assert tuple(comm.DTYPES) == DTYPES


def test_settings_name_all_algorithms_and_are_by_default_what_pytorch_does() -> None:
    names = CommSection.model_fields["allreduce"].annotation
    assert set(get_args(names)) == {BACKEND, *ALGORITHMS}
    section = CommSection()
    assert Travel(section.allreduce, section.bucket_mb) == Travel()


def test_a_row_tells_how_far_its_calls_lie_apart() -> None:
    told = replace(row(seconds=2e-3), mean_s=2.5e-3, quick_s=1.9e-3, slow_s=2.3e-3)
    assert told.spread == pytest.approx(0.2)
    assert str(told).split()[-1] == "20%"
    assert told.as_json()["spread"] == told.spread
