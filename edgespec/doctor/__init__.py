"""What this machine can run: its versions, memory, disk, and the models on it. It knows no text under way.

`inventory.py` lists models, `machine_speed.py` measures memory, arithmetic and `disk_speed.py` the disk, once; both are
kept. `kept_files.py` finds all that edgespec wrote here and can make again.
"""
