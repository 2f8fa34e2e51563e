"""The papers' own experiments, asked again of a pair: a module a paper, a `PaperTable` a figure or table."""
