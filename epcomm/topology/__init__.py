"""Machines as graphs: what is linked to what, how fast, and in which order ranks had best stand in a ring."""

from epcomm.topology.gpus import known_gpus
from epcomm.topology.host import read_host
from epcomm.topology.machine import Device, Link, Route, Topology
from epcomm.topology.nccl_xml import from_nccl_xml
from epcomm.topology.ordering import crossings, ring_order
from epcomm.topology.presets import PRESETS

__all__ = [
    "PRESETS", "Device", "Link", "Route", "Topology", "crossings", "from_nccl_xml", "known_gpus", "read_host",
    "ring_order",
]  # fmt: skip
