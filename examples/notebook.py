"""`epcomm.launch` as in a notebook: cells that start ranks, get their results, and see their errors."""

# %% A function defined right here runs on three ranks, which are processes; results come back by rank.
import torch

import epcomm


def total_of_ranks(start):
    comm = epcomm.init()
    return epcomm.allreduce(torch.tensor(start + comm.rank)).item()


print(epcomm.launch(total_of_ranks, 3, 10))

# %% Ranks can also be threads of this process: they start at once and share its memory.
print(epcomm.launch(total_of_ranks, 3, 20, ranks="threads"))


# %% An error on one rank reaches the others instead of leaving them waiting, and is raised here.
def fails_on_one_rank():
    comm = epcomm.init()
    if comm.rank == 1:
        raise ValueError("rank 1 has a problem")
    comm.barrier()


try:
    epcomm.launch(fails_on_one_rank, 3)
except ValueError as error:
    print(f"raised in the notebook: {error}")


# %% Ranks that call different things are told so.
def calls_differ():
    comm = epcomm.init()
    return comm.barrier() if comm.rank == 0 else comm.allreduce(torch.ones(3))


try:
    epcomm.launch(calls_differ, 2)
except epcomm.errors.MismatchError as error:
    print(f"raised in the notebook: {error}")
