"""Tokens of texts, and texts of tokens, in llama.cpp's form."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.serve.body import Fields, fields_of
from edgespec.serve.refusal import BAD_REQUEST, RefusalError
from edgespec.serve.request_queue import RequestQueue
from edgespec.text.token_ids import encoded, token_ids


class TextBody(Fields):
    """A text whose tokens are asked for."""

    content: str
    add_special: bool = False


class TokensBody(Fields):
    """Tokens whose text is asked for."""

    tokens: list[Any]


async def tokenize(queue: RequestQueue, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of a text; raises RefusalError and EdgespecError."""
    body, engine = fields_of(TextBody, fields), queue.engine
    encode = partial(encoded, engine.pair.tokenizer, add_special_tokens=body.add_special, max_tokens=engine.max_context)
    return {"tokens": await queue.encoding(encode, body.content)}


async def detokenize(queue: RequestQueue, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of tokens; raises RefusalError and EdgespecError."""
    tokens, pair, most = fields_of(TokensBody, fields).tokens, queue.engine.pair, queue.engine.max_context
    if len(tokens) > most:
        what = f"'tokens' has {len(tokens)} tokens, and the context holds {most}. Give fewer at a time."
        raise RefusalError(BAD_REQUEST, what, code="invalid_value", field="tokens")
    ids = token_ids(tokens)
    unknown = next((token for token in ids if not 0 <= token < pair.vocab), None)
    if unknown is not None:
        what = f"{unknown} is no token of the model, whose ids go from 0 to {pair.vocab - 1}."
        raise EdgespecError("E_PROMPT_INVALID", what, "Give ids that /tokenize returned.")
    return {"content": await queue.encoding(pair.tokenizer.decode, ids)}
