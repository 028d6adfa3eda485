"""Two hosts train as one: network namespaces joined by a cable of their own stand for them.

    python examples/show_two_hosts.py

It needs Linux, root and the command `ip`, and says so where it has them not. On each host runs `tools/train.sh`, as on real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from small_run import DUFU, SMALL, children, fail, finish, largest_difference, prepare, records, say, seconds, start

FOLDER = Path("output/show_two_hosts")
SCRIPT = Path(__file__).parent.parent / "tools/train.sh"
NAMES = [f"dufu{os.getpid()}{letter}" for letter in "ab"]
ADDRESS, PORT = "10.78.0.1", "29400"  # nobody else listens in a namespace that was just made
TOLERANCE = 1e-5


class NotPermitted(Exception):
    """Hosts cannot be made here."""


def ip(*words: str) -> str:
    """Run `ip`; return what it prints."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted(f"`ip {' '.join(words)}`: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def two_hosts() -> Iterator[None]:
    """Make two namespaces and a cable between them, and remove them whatever happens."""
    made: list[str] = []
    try:
        for name in NAMES:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "veth0", "netns", NAMES[0], "type", "veth", "peer", "name", "veth0", "netns", NAMES[1])
        for number, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in made:  # the cable goes with its ends
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def over_the_cable() -> int:
    """Return the bytes that host 0 has sent to host 1."""
    return int(json.loads(ip("-n", NAMES[0], "-s", "-j", "link", "show", "veth0"))[0]["stats64"]["tx"]["bytes"])


def main() -> None:
    """Train on one process and on two hosts, compare, and print the figures."""
    if shutil.which("ip") is None:
        print("skipped: the command `ip` is not installed")
        return
    text = prepare(FOLDER)
    settings = ["--data", str(text), *SMALL, "train.train_iter=10"]
    try:
        with two_hosts():
            compare(settings)
    except NotPermitted as error:
        print(f"skipped: network namespaces are not permitted here ({error})")


def compare(settings: list[str]) -> None:
    """Train on both hosts and on one process."""
    say(f"1. Hosts {ADDRESS} and 10.78.0.2: network namespaces {NAMES[0]} and {NAMES[1]}, joined by a cable (veth)")
    say("2. Two processes on each host: two share the matrices (tp2), the hosts share the batch (dp2)")
    own = [*settings, "train.dist.tensor_parallel_size=2", f"train.output_dir={FOLDER}/hosts"]
    call = ["bash", str(SCRIPT), "dufu", "gpt2_tiny", "2", *own]
    before = over_the_cable()
    hosts = []
    try:
        for number, name in enumerate(NAMES):
            own_variables = {"NODE": "2", "NODE_RANK": str(number), "ADDR": ADDRESS, "PORT": PORT, "PYTHON": sys.executable}
            prefix = f"NODE=2 NODE_RANK={number} ADDR={ADDRESS} PORT={PORT}"
            shown = f"{prefix} bash tools/train.sh dufu gpt2_tiny 2 train.dist.tensor_parallel_size=2 …"
            hosts.append(start(["ip", "netns", "exec", name, *call], shown, **own_variables))
        said = [finish(host) for host in hosts]
    finally:
        for host in hosts:
            for pid in [*children(host.pid), host.pid] if host.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
    sent = over_the_cable() - before
    say(f"   host 0 says: {said[0].splitlines()[0]}")
    say(f"   bytes from host 0 to host 1: {sent:,}")
    say("3. One process")
    finish(start([*DUFU, "train", "gpt2_tiny", *settings, f"train.output_dir={FOLDER}/one"]))
    one, found = records(FOLDER / "one"), records(FOLDER / "hosts")
    print("  step  loss on one process     on two hosts")
    for a, b in zip(one, found):
        print(f"  {a['step']:4d}  {a['loss']:.12f}     {b['loss']:.12f}")
    far = largest_difference(one, found)
    if far >= TOLERANCE or sent < 1_000_000 or "dp2xtp2" not in said[0]:
        fail(f"losses differ by {far:.1e}, {sent:,} bytes between the hosts")
    say(
        f"two hosts, dp2xtp2, against one process: {len(one)} steps, losses within {far:.1e}, {sent:,} bytes sent, {seconds():.0f} s"
    )


if __name__ == "__main__":
    main()
