"""Checks that run for minutes, beside the tests."""
