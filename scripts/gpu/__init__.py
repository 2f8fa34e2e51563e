"""The parts of `scripts/gpu_check.py`: each is a file with a function `check`, and runs in a process of its own.

    parts.py        their names, limits of time, and what each says
    processes.py    one part's process, and the verdict on it
    child.py        what that process does
    finding.py      what a part found
    card.py         the device, times on it, and models for it

parts.py lists the parts; a part's file has its name.
"""
