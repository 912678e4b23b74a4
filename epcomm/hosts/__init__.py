"""How CPU ranks reach other hosts: what kernels write down is sent by TCP, or put by UCX."""
