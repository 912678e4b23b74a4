"""The ranks of a job, outside of the kernels: how they meet, agree, and learn of each other's failures."""
