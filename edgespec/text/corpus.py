"""Texts that others may be continued by: files, all files of a folder, and what an engine writes itself.

They say nothing about what a text becomes: their tokens are proposed, and the target decides.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from edgespec.draft.lookup import MOST_CORPUS_TOKENS, Corpus
from edgespec.errors import EdgespecError

MOST_FILE_BYTES = 4 << 20  # of a file; larger ones are data, no text


def read_corpus(paths: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase, *, grows: bool = False) -> Corpus:
    """Return the corpus of files and folders; raises EdgespecError for one that is not there, or is no text."""
    corpus = Corpus(grows=grows)
    for name in paths:
        path = Path(name)
        try:
            if path.is_dir():
                for file in _files_in(path):
                    if file.stat().st_size > MOST_FILE_BYTES:
                        corpus.files_left_out.append(file)
                    else:
                        _add(corpus, file, tokenizer, skips_data=True)
            else:
                _add(corpus, path, tokenizer, skips_data=False)
        except OSError as error:
            what = f"the corpus '{path}' cannot be read: {error.strerror}."
            raise EdgespecError("E_FILE_NOT_FOUND", what, "Name a file of text, or a folder.") from error
    return corpus


def most_corpus_tokens(paths: Iterable[str | Path], *, grows: bool = False) -> int:
    """Return how many tokens such a corpus may have, without reading it: no token of a file is less than a byte."""
    files = (file for name in paths for file in ([Path(name)] if Path(name).is_file() else _files_in(Path(name))))
    sizes = (file.stat().st_size for file in files)
    return MOST_CORPUS_TOKENS if grows else min(MOST_CORPUS_TOKENS, sum(sizes))


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in a fixed order, hidden ones left out."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.is_file():
            yield path


def _add(corpus: Corpus, path: Path, tokenizer: PreTrainedTokenizerBase, *, skips_data: bool) -> None:
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        if skips_data:
            corpus.files_left_out.append(path)
            return
        what = f"the corpus '{path}' is no text in UTF-8."
        raise EdgespecError("E_SETTING", what, "Name a file of text, or a folder.") from error
    corpus.add(tokenizer.encode(text, add_special_tokens=False, verbose=False))
