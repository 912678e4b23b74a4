"""What people run today, tuned: exchanges over gloo and MPI with preallocated buffers."""
