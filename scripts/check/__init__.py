"""Checks in parts: `real_files` runs published models."""
