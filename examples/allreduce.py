"""Collectives on the default communicator.

Run it as `python examples/allreduce.py`, or as `torchrun --standalone --nproc-per-node 2 examples/allreduce.py`.
"""

import os

import torch

import epcomm


def main():
    with epcomm.init() as comm:
        gradient = torch.full((4,), float(comm.rank + 1))
        mean = epcomm.allreduce(gradient, "avg")
        work = epcomm.allreduce(gradient, out=gradient, async_op=True)  # in place, behind your back
        work.wait()
        everyone = epcomm.allgather(torch.tensor([comm.rank]))
        step = comm.bind_allreduce(gradient)  # addresses resolved once, for a hot loop
        for _ in range(3):
            step()
        return f"rank {comm.rank}: mean {mean.tolist()}, ranks {everyone.tolist()}, after 3 steps {gradient.tolist()}"


if __name__ == "__main__":
    if "RANK" in os.environ:
        print(main())
    else:
        print("\n".join(epcomm.launch(main, 2)))
