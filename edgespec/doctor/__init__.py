"""What this machine can run: its versions, memory, disk, and the models on it. It knows no running engine."""
