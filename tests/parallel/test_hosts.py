"""Several hosts: what each is to start, by command line, Slurm and Kubernetes; and two hosts that train together, as network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from dufu.errors import LayoutError
from dufu.parallel.hosts import Hosts, Start, adopt_environment, first_host, split_address, start_of_call
from tests.parallel.test_launch import alive, children, training, until
from tests.pool import Ranks, free_port
from tests.small import TINY, dufu, metrics
from tests.training.trials import run

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[003-007,12],login1", "gpu003"),
        ("a-b[1,3-4]-ib,c", "a-b1-ib"),
        ("r[1-2]n[5-8]", "r1n5"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NODELIST": "gpu[3-4]",
    "SLURM_JOB_ID": "123456", "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


def test_slurm_tasks_are_processes() -> None:
    environment = dict(SLURM)
    assert start_of_call(None, None, None, None, environment) is None
    found = {k: environment[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu3"}
    other = dict(SLURM, SLURM_PROCID="0", SLURM_NODEID="0", SLURM_STEP_NODELIST="gpu9,gpu[3-4]")
    adopt_environment(other)
    assert other["MASTER_ADDR"] == "gpu9" and other["MASTER_PORT"] == environment["MASTER_PORT"]
    another_job = dict(SLURM, SLURM_JOB_ID="123457", SLURM_TASKS_PER_NODE="3,5")
    adopt_environment(another_job)
    assert another_job["MASTER_PORT"] != environment["MASTER_PORT"] and another_job["LOCAL_WORLD_SIZE"] == "5"


def test_slurm_with_a_task_a_host_starts_processes_there() -> None:
    one_each = dict(SLURM, SLURM_NTASKS="2", SLURM_NNODES="2", SLURM_PROCID="1", MASTER_PORT="29400")
    assert start_of_call(4, None, None, None, one_each) == Start(4, Hosts(2, 1, "gpu3", 29400))
    with pytest.raises(LayoutError, match="ntasks-per-node=1"):
        start_of_call(4, None, None, None, dict(SLURM, SLURM_NNODES="2"))


def test_a_batch_script_is_no_task() -> None:
    """Slurm gives a batch script the variables of its first task, though it started nothing beside it."""
    environment = dict(SLURM, SLURM_PROCID="0", ENVIRONMENT="BATCH")
    assert start_of_call(2, None, None, None, environment) == Start(2) and "RANK" not in environment
    environment = dict(SLURM, ENVIRONMENT="BATCH", SLURM_STEP_NUM_TASKS="8")
    assert start_of_call(None, None, None, None, environment) is None and environment["RANK"] == "5"


PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "8", "RANK": "1",
    "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4",
}  # fmt: skip
TRAINJOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
}  # fmt: skip


@pytest.mark.parametrize("pod", [PYTORCHJOB, TRAINJOB])
def test_a_pod_starts_its_processes(pod: dict[str, str]) -> None:
    assert start_of_call(None, None, None, None, dict(pod)) == Start(4, Hosts(2, 1, "job-master-0", 23456))
    assert start_of_call(2, None, None, None, dict(pod)) == Start(2, Hosts(2, 1, "job-master-0", 23456))
    under_torchrun = dict(pod, RANK="6", LOCAL_RANK="2", TORCHELASTIC_RUN_ID="x")
    assert start_of_call(None, None, None, None, under_torchrun) is None
    with pytest.raises(LayoutError, match="PET_NNODES=1:4"):
        start_of_call(None, None, None, None, dict(pod, PET_NNODES="1:4"))
    assert start_of_call(None, None, None, None, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    alone = dict(pod, PET_NNODES="1", PET_NPROC_PER_NODE="1", PET_NODE_RANK="0")
    assert start_of_call(None, None, None, None, alone) is None and "WORLD_SIZE" not in alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((2, 2, None, "a:1"), "--node-rank 0 to 1"),
        ((2, 2, 0, None), "--master ADDRESS:PORT"),
        ((2, 2, 2, "a:1"), "--node-rank 2 of --nnodes 2"),
        ((2, 2, 0, "a"), "no ADDRESS:PORT"),
        ((2, None, None, "a:1"), "--nnodes of 2 or more"),
        ((1, None, 1, None), "--node-rank 1 of --nnodes 1"),
    ],
)
def test_a_place_that_is_not_complete(options: tuple[int | None, int | None, int | None, str | None], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        start_of_call(*options, environment={})
    assert split_address("[fd00::1]:29400") == ("fd00::1", 29400)


def test_the_shipped_jobs_are_whole() -> None:
    """Their commands are ones that dufu knows; Slurm and Kubernetes are not here to run them."""
    examples = TOOLS.parent / "examples"
    assert subprocess.run(["bash", "-n", str(examples / "train.sbatch")]).returncode == 0
    job = yaml.safe_load((examples / "pytorchjob.yaml").read_text())
    pods = job["spec"]["pytorchReplicaSpecs"]
    assert pods["Master"] == pods["Worker"] and pods["Master"]["template"]["spec"]["containers"][0]["command"][:2] == [
        "dufu",
        "train",
    ]


def test_train_sh_says_what_is_missing() -> None:
    script = str(TOOLS / "train.sh")
    for words, environment, message in (
        (["dufu", "gpt2_tiny"], {}, "usage"),
        (["dufu", "gpt2_tiny", "2"], {"NODE": "2"}, "ADDR and PORT"),
        (["no_such.py", "gpt2_tiny", "2"], {}, "no such script"),
    ):
        done = subprocess.run(["bash", script, *words], capture_output=True, text=True, env={**os.environ, **environment})
        assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr


# Two hosts -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[list[str]]]:
    """Yield the beginnings of commands on two hosts, 10.77.0.1 and 10.77.0.2: network namespaces joined by a cable of their own."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts: the command `ip` is not installed")
    names = [f"dufu{os.getpid()}{letter}" for letter in "ab"]

    def ip(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    made = ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"two hosts: network namespaces are not permitted here ({made.stderr.strip()})")
    try:
        commands = [["netns", "add", names[1]], ["link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0",
                    "netns", names[1]]]  # fmt: skip
        for number, name in enumerate(names):
            commands += [["-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "veth0"],
                         ["-n", name, "link", "set", "veth0", "up"], ["-n", name, "link", "set", "lo", "up"]]  # fmt: skip
        for command in commands:
            done = ip(*command)
            if done.returncode:
                pytest.skip(f"two hosts: `ip {' '.join(command)}` is not permitted here ({done.stderr.strip()})")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "del", name)


@contextmanager
def on_both(hosts: list[list[str]], commands: list[list[str]], **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment}
    with ExitStack() as stack:
        processes = []
        for number, (host, command) in enumerate(zip(hosts, commands)):
            own = {**env, "NODE_RANK": str(number)}
            process = subprocess.Popen([*host, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)
            stack.callback(process.communicate)
            stack.callback(end, process)
            processes.append(process)
        yield processes


def end(process: subprocess.Popen[str]) -> None:
    for child in [process.pid, *children(process.pid)]:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


def calls(corpus: Path, folder: Path, *more: str, nproc: int = 1) -> list[list[str]]:
    meeting = f"10.77.0.1:{free_port()}"
    return [
        [sys.executable, "-m", "dufu.cli.main", "train", "gpt2_tiny", "--data", str(corpus), *TINY, f"train.output_dir={folder}",
         "--nproc", str(nproc), "--nnodes", "2", "--node-rank", str(rank), "--master", meeting, *more]
        for rank in range(2)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen[str]], seconds: float = 120) -> list[tuple[int, str, str]]:
    return [(p.returncode, out, err) for p in processes for out, err in [p.communicate(timeout=seconds)]]


def test_two_hosts_train_as_one(two_hosts: list[list[str]], ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    layout = ["train.dist.tensor_parallel_size=2"]
    ranks(1, run, str(tmp_path / "one"), str(corpus), [])
    with on_both(two_hosts, calls(corpus, tmp_path / "run", *layout, nproc=2)) as processes:
        done = finish(processes)
    assert [status for status, _, _ in done] == [0, 0], done
    assert "dp2xtp2" in done[0][1] and done[1][1] == ""
    one, found = metrics(tmp_path / "one"), metrics(tmp_path / "run")
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(one, found):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("file", ["dufu", "script"])
def test_train_sh_on_two_hosts(file: str, two_hosts: list[list[str]], corpus: Path, tmp_path: Path) -> None:
    script = str(TOOLS / "train_net.py") if file == "script" else "-"
    command = ["bash", str(TOOLS / "train.sh"), script, "gpt2_tiny", "1", "--data", str(corpus), *TINY,
               f"train.output_dir={tmp_path}/run"]  # fmt: skip
    with on_both(two_hosts, [command, command], NODE="2", ADDR="10.77.0.1", PORT=str(free_port())) as processes:
        done = finish(processes)
    assert [status for status, _, _ in done] == [0, 0], done
    assert "dp2:" in done[0][1] and [r["step"] for r in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_slurm_tasks_on_two_hosts(two_hosts: list[list[str]], corpus: Path, tmp_path: Path) -> None:
    common = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "10.77.0.1,10.77.0.2", "SLURM_TASKS_PER_NODE": "1(x2)",
              "SLURM_JOB_ID": str(os.getpid())}  # fmt: skip
    command = [sys.executable, "-m", "dufu.cli.main", "train", "gpt2_tiny", "--data", str(corpus), *TINY,
               f"train.output_dir={tmp_path}/run"]  # fmt: skip
    own = [["env", f"SLURM_PROCID={rank}", f"SLURM_NODEID={rank}", *command] for rank in range(2)]
    with on_both(two_hosts, own, **common) as processes:
        done = finish(processes)
    assert [status for status, _, _ in done] == [0, 0], done
    assert "dp2:" in done[0][1] and len(metrics(tmp_path / "run")) == 6


def test_pods_on_two_hosts(two_hosts: list[list[str]], corpus: Path, tmp_path: Path) -> None:
    """As a training operator sets a pod's environment, torchrun and the command itself start the same."""
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "10.77.0.1", "WORLD_SIZE": "2"}
    train = ["train", "gpt2_tiny", "--data", str(corpus), *TINY]
    for name, program in (("dufu", ["dufu.cli.main"]), ("torchrun", ["torch.distributed.run", "-m", "dufu.cli.main"])):
        port, folder = free_port(), tmp_path / name
        own = [
            ["env", f"PET_NODE_RANK={rank}", f"RANK={rank}", sys.executable, "-m", *program, *train, f"train.output_dir={folder}"]
            for rank in range(2)
        ]
        meeting = {"PET_MASTER_PORT": str(port), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port)}
        with on_both(two_hosts, own, **pod, **meeting) as processes:
            done = finish(processes)
        assert [status for status, _, _ in done] == [0, 0], done
        assert "dp2:" in done[0][1] and len(metrics(folder)) == 6


def test_a_process_killed_on_the_second_host_restarts_both(
    two_hosts: list[list[str]], ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    work = ["train.train_iter=60", "train.checkpointer.period=10", "train.evaluation.enabled=false"]
    ranks(2, run, str(tmp_path / "calm"), str(corpus), work)
    folder = tmp_path / "run"
    with on_both(two_hosts, calls(corpus, folder, "--max-restarts", "2", *work)) as processes:
        assert training(folder, processes[0], step=15)
        os.kill(children(processes[1].pid)[0], signal.SIGKILL)
        done = finish(processes)
    assert [status for status, _, _ in done] == [0, 0], done
    assert "(restart 1 of 2)" in done[0][2]
    assert metrics(folder) == metrics(tmp_path / "calm")


def test_a_signal_to_one_host_ends_both_with_a_checkpoint(two_hosts: list[list[str]], corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with on_both(two_hosts, calls(corpus, folder, "train.train_iter=1000000", "train.evaluation.enabled=false")) as processes:
        assert training(folder, processes[0])
        processes[1].send_signal(signal.SIGTERM)
        done = finish(processes)
    assert [status for status, _, _ in done] == [143, 143], done
    assert (folder / "checkpoints" / "latest").exists()


def test_a_host_that_is_gone_ends_the_other(two_hosts: list[list[str]], corpus: Path, tmp_path: Path) -> None:
    """Its launcher is killed, and with it all that could say what happened there."""
    folder = tmp_path / "run"
    with on_both(two_hosts, calls(corpus, folder, "--max-restarts", "2", "train.train_iter=1000000")) as processes:
        assert training(folder, processes[0])
        workers = [pid for p in processes for pid in children(p.pid)]
        processes[0].kill()
        status, _, err = finish(processes[1:], 60)[0]
        assert until(lambda: not any(alive(pid) for pid in workers), 30)
    assert status == 1 and "does not answer any more" in err, err


def test_settings_that_differ_between_hosts_are_named(two_hosts: list[list[str]], corpus: Path, tmp_path: Path) -> None:
    commands = calls(corpus, tmp_path / "run")
    commands[1] += ["--max-restarts", "3"]
    with on_both(two_hosts, commands) as processes:
        done = finish(processes, 60)
    assert [status for status, _, _ in done] == [2, 2]
    assert all("--max-restarts is 0 on host 0 and 3 on host 1" in err for _, _, err in done), done


def test_a_port_that_is_taken_is_named_with_a_free_one() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = dufu("train", "gpt2_tiny", "--nproc", "1", "--nnodes", "2", "--node-rank", "0", "--master", f"127.0.0.1:{port}",
                    timeout=60)  # fmt: skip
    assert done.returncode == 2 and f"port {port}" in done.stderr and "choose another one" in done.stderr, done.stderr
