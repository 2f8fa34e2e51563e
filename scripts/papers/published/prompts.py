"""A fixed list of things to ask a target that people talk to: what it answers is the text that its drafts learn from.

Every task goes with every subject. Those of the last subjects are held out: nothing is fitted on what is said of them.
"""

import random
from itertools import product
from typing import Any

TASKS = (
    "Explain {} to a child of ten.",
    "Write a short story in which {} matters.",
    "Give five tips to somebody who begins with {}.",
    "Write a letter to a friend about {}.",
    "What are the advantages and the disadvantages of {}?",
    "Summarise the history of {} in three paragraphs.",
    "Write a dialogue between a teacher and a student about {}.",
    "List ten words that have to do with {}, each with its meaning.",
    "Write a poem about {}.",
    "How did {} change the life of people?",
    "Plan a lesson of an hour about {}.",
    "Write a Python program that has to do with {}, and say what it does.",
    "What mistakes do people make with {}, and how can they be avoided?",
    "Compare {} today with {} a hundred years ago.",
    "Write a newspaper article about {}.",
    "Answer three questions that a visitor might ask about {}.",
)
SUBJECTS = (
    "sailing boats", "bread", "the moon", "trains", "bees", "chess", "rivers", "paper", "clocks", "gardens", "wool",
    "mountains", "maps", "salt", "bridges", "the human heart", "volcanoes", "cheese", "letters", "horses", "glass",
    "the weather", "wolves", "violins", "money", "schools", "deserts", "bicycles", "tea", "dreams", "islands",
    "iron", "markets", "numbers", "birds", "winter", "lighthouses", "kites", "potatoes", "shadows", "libraries",
    "whales", "windmills", "candles", "forests", "radio", "soap", "castles",
)  # fmt: skip
HELD_OUT = 8  # of the subjects
SEED = 11


def prompts(*, is_held_out: bool) -> list[str]:
    """Return the questions in their fixed order: those to learn from, or those that are held out."""
    subjects = SUBJECTS[-HELD_OUT:] if is_held_out else SUBJECTS[:-HELD_OUT]
    asked = [task.replace("{}", subject) for task, subject in product(TASKS, subjects)]
    random.Random(SEED).shuffle(asked)
    return asked


def as_chat(tokenizer: Any, prompt: str) -> str:
    """Return the text that a chat begins with, by the tokenizer's template, or the prompt where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return prompt
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
