"""Messages become prompts, and answers become messages, thoughts and calls. It knows no terminal and no protocol.

`given_template.py` finds a model's chat template, `rendering.py` fills it, and `chat_template.py` makes token ids of
what it wrote; `continued.py` lets an answer go on. `answer.py` reads thoughts and calls out of an answer, whose marks
each family has (`answer_formats.json`). `call_grammar.py` lets a model write no other call than one of its tools'.
`pictures.py` reads pictures, `picture_parts.py` finds them among the parts of messages, and `picture_prompt.py` lets
the family's processor make a prompt of both. `conversation.py` compares the next turn's token ids with those that both
caches hold, forgets from the first difference on, and reads the rest; `session_file.py` keeps it on disk.
"""
