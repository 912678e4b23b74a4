"""Benchmarks of epcomm beside gloo, MPI and the machine's own copy bandwidth.

| module | role |
| --- | --- |
| `expert_parallel.py`, `allreduce.py` | the two benches; entry points `run_ep(options)` and `run_allreduce(options)` |
| `ep_measurement.py`, `allreduce_measurement.py` | what each rank does in them |
| `decode_latency.py`, `prefill_throughput.py` | the two standard runs, scripts |
| `decode_profile.py` | what a decode step costs before anything is communicated |
| `allreduce_profile.py` | what a small allreduce costs where ranks share cores |
| `shared_core_profile.py` | the parts of a dispatch when ranks share cores, bound evenly and free |
| `gpu_check.py`, `gpu_steps.py` | what one GPU can say about the CUDA target; what each rank does in it |
| `gpu_networks.py` | the part of it that is about networks: a rank that puts to itself |
| `workload.py`, `models.py` | inputs of an expert-parallel case and its float64 oracle; shapes of real models |
| `epcomm_ep.py`, `competitors/` | what is measured, one contestant per file |
| `timing.py`, `gate.py` | interleaved and hot-loop timing between ranks |
| `roofline.py` | the machine's copy bandwidth with all ranks copying at once |
| `world.py`, `rank.py` | starting rank processes in which all libraries live; the rank's side of it |
| `results.py`, `tables.py`, `plots.py`, `reporting.py` | the JSON schema; rendering; progress and files |
"""
