"""`auto` takes this rank's share of the cores, as affinity and container allow, and no more."""

import os
from pathlib import Path

import pytest

from tokenfeed.pipeline.feeding import placement as cores
from tokenfeed.tools.pretokenizing.options import Options


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 cores, with control groups in files of the test."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroups")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("ranks", "share"),
    [(None, 16), ("1", 16), ("8", 2), ("5", 3), ("64", 1), ("0", 16), ("", 16), ("many", 16)],
)
def test_ranks_of_one_machine_share_its_cores(
    machine: Path, monkeypatch: pytest.MonkeyPatch, ranks: str | None, share: int
) -> None:
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores.cores_per_rank() == share


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "8"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_ON_NODE": "16"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_ON_NODE": "64"}, 16),  # bound to them
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 2),
    ],
)
def test_share_of_cores_under_other_launchers(
    machine: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], share: int
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert cores.cores_per_rank() == share


@pytest.mark.parametrize(
    ("membership", "files", "share"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 16),
        ("0::/", {"cpu.max": "650000 100000"}, 6),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000", "cpu.max": "9900000 100000"}, 2),
        ("0::/on/the/host", {"cpu.max": "200000 100000"}, 2),
        (
            "4:memory:/\n3:cpu,cpuacct:/docker/x\n0::/",
            {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"},
            4,
        ),
        (
            "1:cpu:/slice",
            {"cpu/slice/cpu.cfs_quota_us": "-1", "cpu/slice/cpu.cfs_period_us": "100000"},
            16,
        ),
        ("2:cpuset:/\n1:cpuacct:/", {}, 16),
        ("0::/", {"cpu.max": "what"}, 16),
    ],
)
def test_the_quota_of_a_container_counts_as_cores(
    machine: Path, membership: str, files: dict[str, str], share: int
) -> None:
    write(machine / "membership", membership)
    for name, text in files.items():
        write(machine / "cgroups" / name, text)
    assert cores.cores_per_rank() == share


def test_pretokenize_workers_auto_respects_container_quota(machine: Path) -> None:
    options = Options(paths=("corpus", "out"))
    assert options.num_workers == 16
    write(machine / "membership", "0::/")
    write(machine / "cgroups" / "cpu.max", "250000 100000")
    assert options.num_workers == 2


def test_a_quota_is_shared_by_ranks_as_well(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine / "membership", "0::/")
    write(machine / "cgroups" / "cpu.max", "800000 100000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores.cores_per_rank() == 2


def test_a_machine_without_affinity_has_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores.num_cores() == os.cpu_count()
