"""Texts are requested and made here: scheduler, requests, stops. It knows no message, no terminal and no prompt file.

Nobody works in the background. Whoever waits for a text takes a step of all texts, and others who wait are notified
(`scheduler.py`, `step_lock.py`), so any thread may request texts at any time. A text enters where memory allows its
tokens. Samples of one prompt wait until one of them has read it, and copy its rows. A text that fails, ends or is
cancelled leaves the others as they are. Where memory runs out, trees become smaller, then fewer texts are under way;
nothing is lost.

`admission.py` begins a text, or goes on with one; `token_text.py` makes text of its tokens, and `stops.py` ends it.
"""
