"""Kernels that use each function of `device.gpu.network`, and their compilation in a process of its own."""

from __future__ import annotations

import re

import triton.language as tl

from epcomm.device.gpu.aot import CompiledArm, compile_arm, compile_kernel
from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.memory import store_release
from epcomm.device.gpu.network import quiet, raise_remote, start_put
from epcomm.device.gpu.waiting import peer


@kernel("put", programs=one)
def put(ctx, args, rank, to_offset, from_offset, num_bytes, NETWORK: tl.constexpr):
    start_put(ctx, args, rank, to_offset, from_offset, num_bytes, NETWORK)


@kernel("signal", programs=one)
def signal(ctx, args, rank, offset, value, NETWORK: tl.constexpr):
    raise_remote(ctx, args, rank, offset, value, NETWORK)


@kernel("complete", programs=one)
def complete(ctx, args, NETWORK: tl.constexpr):
    quiet(ctx, NETWORK)


@kernel("step", programs=one)
def step(ctx, args, size, num_bytes, epoch, NETWORK: tl.constexpr):
    """As an exchange does it: two puts and a signal to each rank, load and store where they reach."""
    rank = tl.cast(0, tl.int64)
    while rank < size:
        if tl.load((args + 8 * rank).to(tl.pointer_type(tl.int64))) == 0:
            start_put(ctx, args, rank, rank * num_bytes, 4096, num_bytes, NETWORK)
            start_put(ctx, args, rank, rank * num_bytes + 65536, 8192, 64, NETWORK)
            raise_remote(ctx, args, rank, 128, epoch, NETWORK)
        else:
            store_release(peer(ctx, rank) + 128, epoch)
        rank += 1
    quiet(ctx, NETWORK)


KERNELS = {each.name: each for each in (put, signal, complete, step)}


def compiled(name: str, network: str, arch: str) -> tuple[CompiledArm, set[str]]:
    """(what the code is like, the constants that the host must fill in)."""
    arm = KERNELS[name].made_for(NETWORK=network)
    text = compile_kernel(arm, arch).asm["ptx"]
    states = re.findall(r"^\.visible \.const .*?(\w+)\[\d+\]", text, re.MULTILINE)
    return compile_arm(arm, arch), set(states)
