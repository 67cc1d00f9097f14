"""Heat, energy and memory, from files and counters that are written down."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_mlx.bench import energy, machine
from dflash_mlx.bench.machine import Heat, cool_down
from dflash_mlx.bench.probe import share_of_bandwidth


def zone(folder: Path, number: int, now: int, limit: int, kind: str = "passive") -> None:
    path = folder / f"thermal_zone{number}"
    path.mkdir()
    (path / "temp").write_text(f"{now}\n")
    (path / "trip_point_0_type").write_text(kind)
    (path / "trip_point_0_temp").write_text(str(limit))


def test_the_hottest_zone_counts(tmp_path: Path) -> None:
    assert machine._linux_state(tmp_path) is None
    zone(tmp_path, 0, 40_000, 95_000)
    assert machine._linux_state(tmp_path) == "nominal"
    zone(tmp_path, 1, 88_000, 95_000)
    assert machine._linux_state(tmp_path) == "fair"
    zone(tmp_path, 2, 96_000, 95_000)
    assert machine._linux_state(tmp_path) == "critical"


def test_limits_that_slow_nothing_down_are_left_out(tmp_path: Path) -> None:
    zone(tmp_path, 0, 60_000, 50_000, kind="active")
    zone(tmp_path, 1, 60_000, -274_000, kind="critical")
    assert machine._linux_state(tmp_path) is None


def test_this_machine_says_something_or_nothing() -> None:
    assert machine.thermal_state() in (None, "nominal", "fair", "serious", "critical")


def test_a_hot_machine_is_waited_for_but_not_for_ever() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    states: list[Heat | None] = ["serious", "critical", "fair"]
    assert cool_down(lambda: states.pop(0), clock=lambda: now[0], sleep=sleep) == 2.0
    assert cool_down(lambda: "critical", longest=5, clock=lambda: now[0], sleep=sleep) == 5.0
    assert cool_down(lambda: None, clock=lambda: now[0], sleep=sleep) == 0.0


def test_energy_of_all_packages(tmp_path: Path) -> None:
    for name, used in (("intel-rapl:0", 1_000_000), ("intel-rapl:1", 2_000_000), ("intel-rapl:0:0", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{used}\n")
    found = energy._rapl(tmp_path)
    assert found is not None
    with found():
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("4500000\n")
    assert found.joules == pytest.approx(3.5)
    # The counter begins anew at some point.
    with found():
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("5\n")
    assert found.joules is None


def test_the_parts_of_an_apple_chip_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package's names; a chip may lack a counter."""
    readings = [SimpleNamespace(cpu_total_mj=n * 1000, gpu_mj=n * 500, dram_mj=None, ane_mj=0) for n in (1, 2, 4)]
    monitor = SimpleNamespace(get_cumulative_energy=lambda: readings.pop(0))
    monkeypatch.setattr(sys, "platform", "darwin")
    package = SimpleNamespace(AppleEnergyMonitor=lambda: monitor)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", package)  # type: ignore[arg-type]
    found = energy.open_energy()
    with found():
        pass
    assert found.joules == pytest.approx(2 + 1)
    assert "chip" in found.source


def test_a_mac_without_the_package_has_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)  # type: ignore[arg-type]
    monkeypatch.setattr(energy, "_nvidia", lambda: None)
    monkeypatch.setattr(energy, "_rapl", lambda: None)
    assert energy.open_energy().source == ""


def test_a_machine_without_counters_has_no_energy(tmp_path: Path) -> None:
    assert energy._rapl(tmp_path) is None
    nothing = energy.Energy(None)
    with nothing():
        pass
    assert (nothing.joules, nothing.source) == (None, "")


def test_the_share_of_the_memorys_speed() -> None:
    assert share_of_bandwidth(5e9, 1.0, 10e9) == pytest.approx(0.5)
    assert share_of_bandwidth(5e9, 0.0, 10e9) is None
    assert machine.memory_bandwidth(megabytes=4, rounds=2) > 1e6
