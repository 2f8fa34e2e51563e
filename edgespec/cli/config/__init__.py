"""The configuration: its files as defaults of options, and `edgespec config`. Knows no command's meaning."""
