"""The memory of a workload (`liveness`: which tensors are alive at once), and of our client (`process_rss`)."""
