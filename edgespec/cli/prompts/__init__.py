"""Prompt files of any form, as rows. Knows no engine."""
