"""Texts asked for and made: requests, stop strings, conversations. Knows no terminal and no file of prompts."""
