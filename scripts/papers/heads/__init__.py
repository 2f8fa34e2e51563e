"""The parts of scripts.papers.compare_heads."""
