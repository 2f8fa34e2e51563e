"""Draws of tokens: their distribution, and the noise that target and draft share. It knows no model."""
