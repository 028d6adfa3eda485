"""Which host of a run this is, and which process: as its command line, Slurm or Kubernetes says it."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import MutableMapping
from dataclasses import dataclass

from dufu.errors import LayoutError

Environment = MutableMapping[str, str]


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, seen from one of them.

    Args:
        count: hosts.
        rank: this one's number, from 0.
        address, port: where the first host listens; port 0, with one host only, finds a free one.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise LayoutError(f"--node-rank {self.rank} of --nnodes {self.count}: hosts are numbered from 0 to {self.count - 1}")
        if self.count > 1 and not 0 < self.port < 1 << 16:
            raise LayoutError(f"--nnodes {self.count}: several hosts meet at --master ADDRESS:PORT, such as 10.0.0.1:29400")


@dataclass(frozen=True)
class Start:
    """What a command is to start on this host.

    Args:
        processes: here.
        hosts: all that take part.
    """

    processes: int
    hosts: Hosts = Hosts()


def is_worker(environment: Environment = os.environ) -> bool:
    """Say whether a launcher (dufu's, torchrun or a plain RANK and WORLD_SIZE) has made this process one rank of a run.

    Kubernetes' training operators set RANK and PET_NNODES for a whole pod: what runs there first is a launcher.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "LOCAL_RANK" in environment:
        return True
    return "RANK" in environment and "PET_NNODES" not in environment


def start_of_call(
    nproc: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master: str | None,
    environment: Environment = os.environ,
) -> Start | None:
    """Return what this call must start, or None where this process itself is what runs: the only one, or one of those that a launcher,
    or Slurm with a task a process, has started.

    Args:
        nproc, nnodes, node_rank, master: the options of the command line; None where not given.

    Raises:
        LayoutError: numbers that disagree, or a place to meet that is missing.
    """
    if is_worker(environment):
        if nnodes not in (None, 1, int(environment.get("GROUP_WORLD_SIZE", 1))):
            raise LayoutError(
                f"--nnodes {nnodes}: another launcher has already started this process; give the hosts to one of them"
            )
        return None
    if nnodes is None and "PET_NNODES" in environment:
        return _kubernetes(nproc, environment)
    if nnodes is None and slurm_tasks(environment) > 1:
        if nproc in (None, 1):
            adopt_environment(environment)
            return None
        return Start(nproc or 1, _slurm_hosts(nproc or 1, environment))
    if nnodes in (None, 1):
        if master is not None:
            raise LayoutError(f"--master {master}: goes with --nnodes of 2 or more; one host finds a free port itself")
        return Start(nproc or 1, Hosts(1, node_rank or 0)) if (nproc or 1) > 1 or node_rank else None
    if node_rank is None:
        raise LayoutError(f"--nnodes {nnodes}: each host needs its number, --node-rank 0 to {(nnodes or 1) - 1}")
    if master is None:
        raise LayoutError(f"--nnodes {nnodes}: several hosts meet at --master ADDRESS:PORT, such as 10.0.0.1:29400")
    return Start(nproc or 1, Hosts(nnodes or 1, node_rank, *split_address(master)))


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port", also of "[::1]:29400".

    Raises:
        LayoutError: there is no port in it.
    """
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d+)", text.strip())
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise LayoutError(f'"{text}" is no ADDRESS:PORT, such as 10.0.0.1:29400')
    return match[1], int(match[2])


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list such as "gpu[003-007,12],login1"."""
    depth, end = 0, len(nodes)
    for place, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes[:end].strip())


def slurm_tasks(environment: Environment = os.environ) -> int:
    """Return the number of tasks that `srun` started together with this one; 1 outside Slurm and in a batch script's own process."""
    step = environment.get("SLURM_STEP_NUM_TASKS")
    if step is None and environment.get("ENVIRONMENT") == "BATCH":
        return 1
    known = {"SLURM_PROCID", "SLURM_LOCALID"} <= set(environment)
    return int(step or environment.get("SLURM_NTASKS") or 1) if known else 1


def _slurm_place(environment: Environment) -> tuple[str, int]:
    """Return where the tasks of a Slurm step meet, unless MASTER_ADDR and MASTER_PORT say it: its first host, a port made of its number."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    address = environment.get("MASTER_ADDR") or (first_host(nodes) if nodes else "127.0.0.1")
    # Below the ports that systems hand out by themselves; two steps of one job differ.
    job, step = (_number(environment.get(name)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    job = job or _number(environment.get("SLURM_JOBID"))
    return address, int(environment.get("MASTER_PORT") or 10000 + (job + 1009 * step) % 20000)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _slurm_hosts(nproc: int, environment: Environment) -> Hosts:
    """Return the hosts of a step with one task a host, each of which starts processes itself."""
    tasks = slurm_tasks(environment)
    hosts = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or tasks)
    if hosts != tasks:
        raise LayoutError(
            f"--nproc {nproc}, but Slurm started {tasks} tasks on {hosts} hosts; start one a host (srun --ntasks-per-node=1), "
            f"or one a process without --nproc"
        )
    return Hosts(tasks, int(environment["SLURM_PROCID"]), *_slurm_place(environment))


def _slurm_local_size(environment: Environment) -> int:
    """Return the number of tasks on this host, from a list such as "2(x3),1"."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    sizes = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    here = _number(environment.get("SLURM_NODEID"))
    if here < len(sizes):
        return sizes[here]
    return _number(environment.get("SLURM_NTASKS_PER_NODE")) or 1


def adopt_environment(environment: Environment = os.environ) -> None:
    """Where Slurm has started one task a process, say so in the variables that PyTorch reads."""
    if "RANK" in environment or "TORCHELASTIC_RUN_ID" in environment or slurm_tasks(environment) < 2:
        return
    address, port = _slurm_place(environment)
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=str(slurm_tasks(environment)),
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(_slurm_local_size(environment)),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )


def _kubernetes(nproc: int | None, environment: Environment) -> Start | None:
    """Return what a pod of a training operator (PyTorchJob, TrainJob) is to start."""
    nodes, processes = environment["PET_NNODES"], environment.get("PET_NPROC_PER_NODE", "1")
    if not nodes.isdigit() and len(set(nodes.split(":"))) > 1:
        raise LayoutError(f"PET_NNODES={nodes}: a run has a fixed number of hosts; set the smallest and the largest to the same")
    count = int(nodes.split(":")[0])
    own = nproc or (int(processes) if processes.isdigit() else _devices(processes))
    rank = environment.get("PET_NODE_RANK") or environment.get("RANK") or environment.get("JOB_COMPLETION_INDEX") or "0"
    if count == 1:
        for name in ("RANK", "WORLD_SIZE"):  # the pod's, which are no process's
            environment.pop(name, None)
        return Start(own, Hosts()) if own > 1 else None
    address, port = environment.get("PET_MASTER_ADDR"), environment.get("PET_MASTER_PORT")
    if not address and environment.get("PET_RDZV_ENDPOINT"):
        address, found = split_address(environment["PET_RDZV_ENDPOINT"])
        port = str(found)
    address, port = address or environment.get("MASTER_ADDR"), port or environment.get("MASTER_PORT")
    if not address or not port:
        raise LayoutError(
            f"PET_NNODES={nodes}, but neither PET_MASTER_ADDR and PET_MASTER_PORT nor MASTER_ADDR and MASTER_PORT are set"
        )
    return Start(own, Hosts(count, int(rank), address, int(port)))


def _devices(kind: str) -> int:
    """Return torchrun's number of processes for "auto", "gpu" and "cpu"."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "gpu" and not gpus:
        raise LayoutError("PET_NPROC_PER_NODE=gpu: PyTorch finds no GPU here; give a number")
    if kind not in ("auto", "gpu", "cpu"):
        raise LayoutError(f'PET_NPROC_PER_NODE={kind}: a number, "auto", "gpu" or "cpu"')
    return gpus if gpus and kind != "cpu" else os.cpu_count() or 1


def settle_network(address: str, environment: Environment = os.environ) -> None:
    """Let gloo speak over the interface that leads to the first host; by itself it takes the one of this host's name, which on many
    clusters, and in containers, leads nowhere."""
    if "GLOO_SOCKET_IFNAME" in environment:
        return
    found = interface_to(address)
    if found is not None:
        environment["GLOO_SOCKET_IFNAME"] = found


def interface_to(address: str) -> str | None:
    """Return the name of the interface with the address from which packets to a host leave; None where the system does not say."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: a datagram socket only looks up the way
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                except OSError:
                    continue  # an interface without an address
                if answer[20:24] == own:
                    return name
    except (ImportError, OSError):
        return None
    return None
