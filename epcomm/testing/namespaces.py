"""Several hosts on one machine: a network namespace each, joined by links of a limited rate. Linux only.

A namespace lives as long as a process in it, which ends when this one does, however it ends; links end with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from epcomm.testing.ranks import Pool, outcomes_or_errors

_PORT = 29500  # nobody else is in the namespaces
LINK = "link0"  # the name of a host's interface
_TOOLS = ("ip", "tc", "unshare", "nsenter")


class Network:
    """Hosts 0.. with the addresses `address(host)`, each linked to a switch at `rate` in both directions."""

    def __init__(self, num_hosts: int, rate: str):
        self._keepers: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(num_hosts + 1):  # the last one is the switch
                self._keepers.append(self._new_namespace())
            self._run(num_hosts, "ip link add switch type bridge")
            self._run(num_hosts, "ip link set switch up")
            for host in range(num_hosts):
                self._link(host, num_hosts, rate)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> list[str]:
        """What to put in front of a command so that it runs on a host."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._keepers[host].pid), *user, "--net", "--"]

    def enter_with_devices(self, host: int) -> list[str]:
        """As `enter`, and /sys shows the host's interfaces, if this machine allows that: libraries look there."""
        script = 'mount -t sysfs sysfs /sys 2> /dev/null; exec "$@"'
        return [*self.enter(host), "unshare", "--mount", "--", "sh", "-c", script, "sh"]

    def close(self) -> None:
        for keeper in self._keepers:
            keeper.kill()
            keeper.communicate()

    def _new_namespace(self) -> subprocess.Popen[bytes]:
        if os.geteuid() == 0:
            command = ["unshare", "--net"]
        elif not self._keepers:
            command = ["unshare", "--user", "--map-root-user", "--net"]
        else:  # in the first one's user namespace, whose root may link them
            command = [*self.enter(0)[:-2], "--", "unshare", "--net"]
        script = "echo; exec cat"  # ends with the pipe
        keeper = subprocess.Popen(
            [*command, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if keeper.stdout is None or not keeper.stdout.read(1):
            _, errors = keeper.communicate()
            raise OSError(f"no network namespace: {errors.decode().strip()}")
        return keeper

    def _link(self, host: int, switch: int, rate: str) -> None:
        peer = self._keepers[switch].pid
        shaped = f"root tbf rate {rate} burst 128kb latency 50ms"
        self._run(host, "ip link set lo up")
        self._run(host, f"ip link add name {LINK} type veth peer name port{host} netns {peer}")
        self._run(host, f"ip address add {self.address(host)}/24 dev {LINK}")
        self._run(host, f"ip link set {LINK} up")
        self._run(host, f"tc qdisc add dev {LINK} {shaped}")
        self._run(switch, f"ip link set port{host} master switch up")
        self._run(switch, f"tc qdisc add dev port{host} {shaped}")

    def _run(self, host: int, command: str) -> None:
        done = subprocess.run([*self.enter(host), *command.split()], capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"`{command}` for host {host} of a network of namespaces: {done.stderr.strip()}")


@contextlib.contextmanager
def network(num_hosts: int, rate: str = "1gbit") -> Iterator[Network]:
    """Hosts while the context is open. Raises OSError if this machine doesn't allow it."""
    opened = Network(num_hosts, rate)
    try:
        yield opened
    finally:
        opened.close()


def available() -> str | None:
    """None if this machine allows such networks, else why not."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with network(1):
            return None
    except OSError as error:
        return str(error)


def rank_outcomes_on_hosts(
    fn: Callable[..., Any],
    node_of_rank: Sequence[int],
    *args: Any,
    rate: str = "1gbit",
    timeout: float = 60.0,
    expendable: Collection[int] = (),
) -> list[Any]:
    """Like `testing.ranks.rank_outcomes`, each rank on its host; they meet by `open_store`."""
    with network(max(node_of_rank) + 1, rate) as hosts:
        pool = Pool([hosts.enter_with_devices(node) for node in node_of_rank])
        try:
            return outcomes_or_errors(pool, fn, len(node_of_rank), args, timeout=timeout, expendable=expendable)
        finally:
            pool.close()


def open_store(rank: int) -> Any:
    """The store by which ranks on the hosts of a network meet; rank 0, on host 0, has it."""
    from torch.distributed import TCPStore

    return TCPStore(Network.address(0), _PORT, is_master=rank == 0, wait_for_workers=False)
