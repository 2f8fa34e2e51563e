"""Texts are requested and made here: scheduler, stops, conversations. It knows no terminal and no prompt file.

Nobody works in the background. Whoever waits for a text takes a step of all texts, and others who wait are notified
(`scheduler.py`, `turn.py`), so any thread may request texts at any time. A text enters where memory allows its tokens.
Samples of one prompt wait until one of them has read it, and copy its rows. A text that fails, ends or is cancelled
leaves the others as they are. Where memory runs out, trees become smaller, then fewer texts are under way; nothing is
lost.

`enter.py` begins a text, or goes on with one; `token_text.py` makes text of its tokens, and `stops.py` ends it.
`conversation.py` compares the next turn's token ids with those that both caches hold, forgets from the first difference
on, and reads the rest. `prompt_cache.py` keeps keys and values of what prompts have in common in a safetensors file, by
model, format, device and tokens; texts begin on copies of the rows that their own prompt shares (`prompt_rows.py`).
`slots.py` has such a file for each conversation of a folder. `kept.py` keeps the rows of texts that have ended in the
memory that those under way leave, and chooses what a new text begins on.
"""
