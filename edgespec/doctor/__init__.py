"""What this machine can run: its versions, memory, disk, and the models on it. It knows no step and no command.

`inventory.py` lists models, `machine_speed.py` measures memory, arithmetic and `disk_speed.py` the disk, once; both are
kept. `kept_files.py` finds all that edgespec wrote here and can make again. `profile_pair.py` runs an engine's own
tuner over a user's prompts, and keeps what it learned.
"""
