"""The options that several commands share, and what their values mean. Knows no command."""
