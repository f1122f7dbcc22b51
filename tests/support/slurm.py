"""A Slurm of one node on this machine, started without the system's own services."""

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import which

__all__ = ["can_run_slurm", "slurm"]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr={address} CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def can_run_slurm() -> bool:
    """Whether it is installed, and who runs the tests may start it."""
    return os.geteuid() == 0 and all(map(which, ("munged", "slurmctld", "slurmd", "sbatch")))


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `sbatch` finds it."""
    folder.mkdir(mode=0o755)
    key, configuration = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    content = CONFIGURATION.format(
        host=socket.gethostname(), address="127.0.0.1", folder=folder, ports=_free_ports()
    )
    configuration.write_text(content)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    commands = [munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]]
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            time.sleep(0.5)
        _wait_until_idle(environment)
        yield environment


def _wait_until_idle(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        asked = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True
        )
        if "idle" in asked.stdout:
            return
        assert time.monotonic() < deadline, asked.stdout + asked.stderr
        time.sleep(0.3)


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], second.getsockname()[1]]
