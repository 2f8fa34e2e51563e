"""The machine: its devices, cores and memory, as the operating system and PyTorch show them. It knows no model.

`device.py` has what differs between a card and a processor. `cpu.py` counts the cores that a process may use, which a
control group may limit (`cgroup.py`); `host_memory.py` reads what is free. `claim.py` sets a card up while a pair is
there, and `environment.py` reads variables.
"""
