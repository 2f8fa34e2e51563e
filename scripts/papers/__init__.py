"""Tables, fits and comparisons of the papers' methods."""
