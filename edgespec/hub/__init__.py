"""Model files by name, from this machine's stores or a hub. It knows no pair, and reads no weights.

`names.py` looks in the Hugging Face cache (`cache.py`), Ollama's store (`ollama.py`) and folders of other programs
(`other_programs.py`); `download.py` fetches what is missing where that is allowed, and `user_config.py` has the names
that a user has given. `gguf_models.py` lists the GGUF files of a folder, and `places.py` all places
of this machine where models lie.
"""
