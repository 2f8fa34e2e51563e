"""Grammars of simple forms: one of some texts, and a regular expression, in Lark's form."""

import json
import re
from collections.abc import Sequence


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of one of these texts, none of which is empty."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def regex_grammar(expression: str) -> str:
    """Return the grammar of texts that match a regular expression as a whole."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", expression, flags=re.DOTALL).replace("\n", r"\n")
    return f"start: TEXT\nTEXT: /{escaped}/"
