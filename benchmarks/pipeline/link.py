"""Hosts on one machine, joined by links of a given speed.

Each host is a process in a network namespace of its own. A veth pair leads from there to a bridge in the namespace of
the process that started it; a token bucket on either end lets through `rate` in each direction, as a network card does.
The namespaces have no name: the kernel takes them down, and all devices with them, when the last process in them ends,
however it ends. Nothing of the machine's own network is touched or reached.

Needs Linux with bridges, veth and the tbf qdisc, `ip` and `tc` (Debian: iproute2), and root or `unshare -rn COMMAND`.
"""

import ctypes
import os
import shutil
import signal
import subprocess

DEVICE = "eth0"  # of a host
_BRIDGE = "hosts"
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1
_PACKET = 16384  # bytes: largest handed to a token bucket at once
_BURST = 2 * _PACKET  # that may pass at once
_QUEUE = "400ms"  # room in front of a bucket, before it drops packets


def address(host: int) -> str:
    return f"10.0.0.{host + 1}"


def die_with_parent() -> None:
    """Call in a child process, so that none outlives a killed benchmark."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_network() -> None:
    """Move this process into a network namespace of its own. Call before it starts threads."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise SystemExit(f"{' and '.join(missing)} not found; Debian has them in iproute2")
    if _libc().unshare(_CLONE_NEWNET):
        error = os.strerror(ctypes.get_errno())
        raise SystemExit(f"cannot make a network namespace ({error}): start as root or under `unshare -rn`")
    _ip("link set lo up")


def build_bridge() -> None:
    """In the namespace of the process that starts the hosts."""
    _ip(f"link add {_BRIDGE} type bridge")
    _ip(f"link set {_BRIDGE} addrgenmode none up")


def plug_in(host: int, process: int, rate: int) -> None:
    """Join a host, whose process has left the network, to the bridge. rate: Mbit/s."""
    port = f"host{host}"
    _ip(f"link add {port} type veth peer name {DEVICE} netns {process}")
    _ip(f"link set {port} master {_BRIDGE} addrgenmode none up")
    _limit(port, rate)


def unplug(host: int) -> None:
    subprocess.run(["ip", "link", "del", f"host{host}"], stderr=subprocess.DEVNULL, check=False)


def configure(host: int, rate: int) -> None:
    """In the host's process, once it is plugged in."""
    _ip(f"address add {address(host)}/24 dev {DEVICE}")
    _ip(f"link set {DEVICE} addrgenmode none up")
    _limit(DEVICE, rate)


def _limit(device: str, rate: int) -> None:
    _ip(f"link set {device} gso_max_size {_PACKET}")
    _run(f"tc qdisc replace dev {device} root tbf rate {rate}mbit burst {_BURST} latency {_QUEUE}")


def _ip(command: str) -> None:
    _run(f"ip {command}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{command}` failed: {done.stderr.strip()}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
