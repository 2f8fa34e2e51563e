"""What was written is on the disk, where the file system can say so."""

import errno
import os

# What network and user-space file systems say that have no such call.
_CANNOT = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def sync_to_disk(descriptor: int) -> None:
    """Wait until an open file, or folder, is on the disk; do nothing where its file system cannot. Raises OSError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
