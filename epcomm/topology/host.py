"""This machine's cores, caches and NUMA domains, as Linux describes them under /sys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from epcomm.errors import UnsupportedError
from epcomm.topology.machine import Device, Link, Topology

_LOCAL = 10  # ACPI's distance of a NUMA domain to itself


def read_host(root: Path | str = "/sys/devices/system", num_ranks: int | None = None) -> Topology:
    """A topology whose ranks are the cores that are online, one per physical core; or `num_ranks`, which share cores in
    turn if there are more. On which core a rank runs is Linux's business: they are alike but for what they share.

    Linux doesn't say how fast memory is: bandwidths are relative, 1 inside of a NUMA domain, 10 / distance between two
    (ACPI's distance, which is 10 inside). A core hangs on its caches, level by level, and the last one on its domain.
    UnsupportedError if `root` has no description of cores.
    """
    root = Path(root)
    online = root / "cpu" / "online"
    if not online.exists():
        raise UnsupportedError(f"read_host: {root} doesn't describe cores; only Linux does")
    devices: dict[str, Device] = {}
    links: list[Link] = []
    domain_of = _numa_domains(root, devices, links)
    ranks, physical = [], set()
    for core in parse_list(online.read_text()):
        folder = root / "cpu" / f"cpu{core}"
        siblings = parse_list(_read(folder / "topology" / "thread_siblings_list", str(core)))
        if min(siblings) in physical:
            continue
        physical.add(min(siblings))
        name = f"core{core}"
        devices[name] = Device(name, "core")
        ranks.append(name)
        below = name
        for cache in _caches(folder):
            is_new = cache.name not in devices
            devices[cache.name] = cache
            links.append(Link(below, cache.name, "cache", 1.0))
            below = cache.name
            if not is_new:
                break  # what that hangs on is known
        else:
            links.append(Link(below, domain_of.get(core, "cpu0"), "cache", 1.0))
    cores = list(ranks)
    for rank in range(len(cores), num_ranks or 0):
        ranks.append(_share(cores[rank % len(cores)], rank // len(cores), devices, links))
    topology = Topology("host", tuple(devices.values()), tuple(links), tuple(ranks), unit="relative")
    return topology if num_ranks is None else topology.first_ranks(num_ranks)


def _share(core: str, turn: int, devices: dict[str, Device], links: list[Link]) -> str:
    """Adds one more rank of a core: a device beside it, on the same cache."""
    name = f"{core}, turn {turn}"
    devices[name] = Device(name, "core")
    links += [replace(link, a=name) for link in links if link.a == core]
    return name


def _numa_domains(root: Path, devices: dict[str, Device], links: list[Link]) -> dict[int, str]:
    """Adds the domains that have cores and the links between them; returns each core's."""
    domain_of: dict[int, str] = {}
    numbers = parse_list(_read(root / "node" / "online", "0"))
    for number in numbers:
        devices[f"cpu{number}"] = Device(f"cpu{number}", "cpu")
        for core in parse_list(_read(root / "node" / f"node{number}" / "cpulist", "")):
            domain_of[core] = f"cpu{number}"
        distances = _read(root / "node" / f"node{number}" / "distance", "").split()
        for other, distance in zip(numbers, distances):
            if other < number:
                links.append(Link(f"cpu{other}", f"cpu{number}", "socket", _LOCAL / int(distance)))
    return domain_of


def _caches(core: Path) -> list[Device]:
    """A core's caches of data, the first level first; named by the lowest of the cores that share them."""
    found: dict[int, Device] = {}
    for index in (core / "cache").glob("index*"):
        if _read(index / "type", "").strip() != "Instruction":
            level, shared = int(_read(index / "level", "0")), parse_list(_read(index / "shared_cpu_list", ""))
            size = _read(index / "size", "0K").strip()
            found[level] = Device(f"L{level} of {min(shared)}", "cache", num_bytes=int(size.rstrip("K")) * 1024)
    return [found[level] for level in sorted(found)]


def parse_list(text: str) -> list[int]:
    """Linux's lists of numbers: "0-3,8" is [0, 1, 2, 3, 8]."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _read(path: Path, default: str) -> str:
    return path.read_text() if path.exists() else default
