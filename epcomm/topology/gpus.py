"""What is known of GPUs that reach each other by load and store, without asking the driver for their links."""

from __future__ import annotations

import re
from dataclasses import replace

from epcomm.topology.machine import Topology
from epcomm.topology.presets import PRESETS, full_mesh

#: presets of machines whose GPUs are all behind one NVSwitch, by a word of the GPU's name
_BEHIND_SWITCH = {"H100": "dgx_h100", "H200": "dgx_h200", "GB200": "gb200_nvl72"}


def known_gpus(name: str, num_ranks: int, has_switch: bool) -> Topology:
    """The machine of so many ranks, each on a GPU of that name, e.g. "NVIDIA H100 80GB HBM3".

    With `has_switch`, an NVSwitch between all of them, the preset of that GPU. Of all others no more is known than that
    they reach each other: a full mesh, whose bandwidths are relative.
    """
    words = re.split(r"\W+", name)
    found = next((preset for word, preset in _BEHIND_SWITCH.items() if word in words), None)
    if has_switch and found is not None and num_ranks <= (machine := PRESETS[found]()).num_ranks:
        return machine.first_ranks(num_ranks)
    return replace(full_mesh(num_ranks), name="gpus", unit="relative")
