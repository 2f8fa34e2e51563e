"""Drafts in published containers, trained for the built-in target, and what they accept."""
