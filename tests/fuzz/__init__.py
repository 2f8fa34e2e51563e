"""Inputs that nobody would send, and servers under attack: each module is a program, bounded in time."""
