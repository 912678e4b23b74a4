"""The wheels that networks of GPUs need, and what tests do without them."""

from __future__ import annotations

import importlib.util

import pytest

from epcomm.device.gpu import bitcode
from epcomm.errors import UnsupportedError

WHEELS = {"nvshmem": "nvshmem", "gin": "nccl"}
_PACKAGES = {"nvshmem": "nvshmem", "gin": "nccl"}  # of Python's bindings


def need(request: pytest.FixtureRequest, network: str, with_bindings: bool = False) -> None:
    """Skips what needs a network's wheels where they aren't installed, or fails if they are required."""
    missing = ""
    try:
        bitcode.installed(WHEELS[network])
    except UnsupportedError as error:
        missing = str(error)
    if with_bindings and not missing and importlib.util.find_spec(_PACKAGES[network]) is None:
        missing = f"{_PACKAGES[network]} isn't installed"
    if missing and request.config.getoption("--require-networks"):
        pytest.fail(f"{missing}; epcomm[link] is required")
    if missing:
        pytest.skip(f"{missing}; make test-gpu-link installs it")
