"""What this machine can run: its versions, memory, disk, and the models on it. Knows no running engine."""
