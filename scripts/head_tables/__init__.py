"""The parts of scripts/compare_heads.py."""
