"""Work spread over machines: workers, their jobs, and Ray, which starts them. Knows no prompts, files or records."""

from edgespec.distributed.batch_generator import BatchGenerator

__all__ = ["BatchGenerator"]
