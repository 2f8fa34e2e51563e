"""Errors of a profile, worded for the person who must mend what is wrong."""


class ProfileError(Exception):
    """A fault with a stable `code`, one sentence `what`, and the `fix` to try."""

    def __init__(self, code: str, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}")
        self.code = code
        self.what = what
        self.fix = fix
