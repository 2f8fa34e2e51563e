"""Texts asked for and made: requests, stop strings, conversations. It knows no terminal and no file of prompts."""
