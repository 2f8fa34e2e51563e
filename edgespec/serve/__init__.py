"""The local server: an HTTP room over an engine. It knows no command line, and no model.

A request goes through four hands. `guard.py` lets in who may ask, and bounds what they send. A protocol's module
(`openai_chat.py`, `openai_completions.py`) reads the body, refuses by name what it cannot honour, and makes a `Job`.
`request_queue.py` makes texts of the engine from it, at most as many as may
wait, and yields their events: what a pass added, and how a text ended.
The protocol's module writes those as its clients read them. `app.py` says which path is whose.

Nobody works in the background here either: a thread waits for each text, and takes steps of all texts as others do.
"""
