"""What a machine with one GPU can say of NVSHMEM and of NCCL's device side: a rank that puts to itself.

    python benchmarks/gpu_networks.py nvshmem | nccl | gin

Prints a line of JSON: {"outcome": "ran" | "refused" | "failed", "detail": ...}. `gpu_check` runs each in a process of
its own, as a network's library may end its process when it finds no adapter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
import typer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from epcomm.device import control
from epcomm.device.gpu.compile import Kernel, kernel, one
from epcomm.device.gpu.machine import clock_ns
from epcomm.device.gpu.memory import load_acquire, set_word, word
from epcomm.device.gpu.network import quiet, raise_remote, start_put
from epcomm.errors import UnsupportedError
from epcomm.heap.nccl import NcclNetwork
from epcomm.heap.network import Network, NetworkSegment
from epcomm.heap.nvshmem import NvshmemNetwork
from epcomm.kernels.gpu.cuda import require_cuda

CHECKS = {
    "nvshmem": "NVSHMEM, one rank: put, signal, wait",
    "nccl": "NCCL, one rank: communicator, window, device communicator",
    "gin": "NCCL GIN, one rank: put, signal, wait",
}
_SECONDS = 120.0  # that a check may take before its process is ended
WAIT_NS = tl.constexpr(5_000_000_000)
_BYTES, _FROM, _TO, _SIGNAL, _EPOCH = 100_000, 4096, 1 << 19, control.LINE, 7
_SEGMENT_BYTES = 1 << 20
_LINES = 4
_SET_UP = "set up"  # printed once the network has accepted everything: what goes wrong later is a failure


@kernel("put_to_self", programs=one)
def put_to_self(ctx, window, from_offset, to_offset, num_bytes, offset, value, result, NETWORK: tl.constexpr):
    """Writes the signal word as it is found after the put: `value`, or less if it isn't raised in time."""
    rank = word(ctx, control.RANK)
    start_put(ctx, window, rank, to_offset, from_offset, num_bytes, NETWORK)
    raise_remote(ctx, window, rank, offset, value, NETWORK)
    own = word(window, rank)
    deadline = clock_ns() + WAIT_NS
    found = load_acquire(own + offset)
    while (found < value) & (clock_ns() < deadline):
        found = load_acquire(own + offset)
    set_word(result, 0, found)
    quiet(ctx, NETWORK)


def _one_rank(payload: bytes) -> list[bytes]:
    return [payload]


def _words(words: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64, device=device)


def _launch(arm: Kernel, network: Network, device: torch.device, numbers: tuple[int, ...]) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    options = {**arm.options_for(f"sm_{major}{minor}"), **arm.constants}
    compiled = arm.function.run(*numbers, grid=(1,), warmup=True, **options)
    compiled._init_handles()
    network.prepare(compiled.module)
    arm.function[(1,)](*numbers, **options)
    torch.cuda.synchronize(device)


def _put(network: Network, segment: NetworkSegment, device: torch.device) -> dict[str, Any]:
    """Puts bytes of the own segment to another place in it, and waits for the signal that follows them."""
    memory = segment.own.part(0, _SEGMENT_BYTES).lend(None).tensor(0, torch.uint8, (_SEGMENT_BYTES,))
    memory[_FROM : _FROM + _BYTES] = torch.randint(1, 255, (_BYTES,), dtype=torch.uint8, device=device)
    window = _words([*map(int, segment.bases), *segment.network], device)
    context = [0] * control.CONTEXT_WORDS
    context[control.SIZE], context[control.NETWORK] = 1, network.address
    ctx, result = _words(context, device), _words([-1], device)
    numbers = (ctx.data_ptr(), window.data_ptr(), _FROM, _TO, _BYTES, _SIGNAL, _EPOCH, result.data_ptr())
    _launch(put_to_self.made_for(NETWORK=network.name), network, device, numbers)
    if result.item() != _EPOCH:
        raise AssertionError(f"the signal is {result.item()} after {WAIT_NS.value / 1e9:g} s, wanted {_EPOCH}")
    if not torch.equal(memory[_TO : _TO + _BYTES], memory[_FROM : _FROM + _BYTES]):
        raise AssertionError("the signal was seen, but not all that was put before it")
    return {"bytes": _BYTES}


def check(name: str) -> dict[str, Any]:
    """Runs one check in this process; UnsupportedError if the network refuses."""
    device = require_cuda(torch.device("cuda", 0))
    if name == "nvshmem":
        network: Network = NvshmemNetwork(0, device, _one_rank)
    else:
        network = NcclNetwork(0, device, _one_rank, needs_gin=name == "gin")
    segment = network.segment(_SEGMENT_BYTES, _LINES * control.LINE, _one_rank)
    print(_SET_UP, flush=True)
    if int(segment.bases[0]) == 0:
        raise AssertionError("a rank can't load from its own segment")
    found = {"handle": segment.network[control.WINDOW_HANDLE] != 0, "communicator": network.address != 0}
    return found if name == "nccl" else _put(network, segment, device)


def outcome(name: str, run: Callable[[str], dict[str, Any]] = check) -> dict[str, Any]:
    """What becomes of a check."""
    try:
        return {"outcome": "ran", "detail": "", "value": run(name)}
    except UnsupportedError as refusal:
        return {"outcome": "refused", "detail": str(refusal)}
    except Exception as error:  # whatever it is, it is this check's result
        return {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"}


def outcome_in_process(name: str, command: list[str] | None = None, seconds: float = _SECONDS) -> dict[str, Any]:
    """The same, of a process of its own. If it ends without an answer, what it did last decides whose fault it is."""
    command = [sys.executable, str(Path(__file__).resolve()), name] if command is None else command
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        said, end = process.stdout, f"its process ended with {process.returncode}: {process.stderr.strip()[-500:]}"
    except subprocess.TimeoutExpired as expired:
        said, end = _text(expired.stdout), f"no answer in {seconds:g} s: {_text(expired.stderr).strip()[-500:]}"
    lines = said.splitlines()
    for line in reversed(lines):
        if line.startswith('{"outcome"'):
            return json.loads(line)
    return {"outcome": "failed" if _SET_UP in lines else "refused", "detail": end}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def main(name: str = typer.Argument(help="nvshmem, nccl or gin")) -> None:
    """Prints what becomes of one check."""
    if name not in CHECKS:
        raise typer.BadParameter(f"wanted one of {', '.join(CHECKS)}, got {name!r}")
    print(json.dumps(outcome(name)), flush=True)


if __name__ == "__main__":
    typer.run(main)
