"""Work spread over machines: workers, their jobs, and Ray, which starts them. Knows no prompts, files or records.

`dispatch.py` hands jobs to workers and takes them back from those that are lost; it reads jobs as it hands them out. It
knows a pool of three methods, which is Ray's actors (`ray_worker_pool.py`), stand-ins in tests, or a simulation. A
worker says what it would run with, loads, and then exchanges jobs for answers; two calls wait for it, so that it never
waits for the driver. `worker.py` compares what all workers would run with before a weight is read.
"""

from edgespec.distributed.batch_generator import BatchGenerator

__all__ = ["BatchGenerator"]
