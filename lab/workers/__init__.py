"""The lab's workers: this process, a process for each core, or a Ray cluster. The numbers are the same.

engines          opens workers by name
workers          defines tasks, and holds the workers of this process alone
processes        a process for each core
ray_workers      a Ray cluster
threads          limits the threads of each worker
shared_arrays    passes arrays between processes without copies
"""
