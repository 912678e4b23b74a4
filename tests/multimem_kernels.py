"""A kernel of what no kernel of the library uses yet: a signal by multicast."""

from __future__ import annotations

from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.multimem import multimem_signal
from epcomm.device.gpu.waiting import enter, leave


@kernel("signal_everyone", programs=one, oldest_arch="sm_90")
def signal_everyone(ctx, args, fingerprint, multicast, offset, value, c3, c4, c5):
    program, status = enter(ctx, fingerprint, "none")
    multimem_signal(ctx, multicast, offset, value)
    leave(ctx, status)
