"""The number of torch's own threads, for a block.

They wait for each other at every operation: many small ones are fastest on one thread, and beside other programs by
far, which take a core from one of the threads while the others wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Have torch use this number of threads within this block, and leave it as it was."""
    own = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(own)
