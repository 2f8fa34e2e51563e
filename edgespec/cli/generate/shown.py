"""Texts that are shown while they are made, one after the other."""

import sys
from collections.abc import Generator, Sequence

from edgespec.chat.answer import AnswerReader, answer_format_of
from edgespec.chat.tools import shown_parts
from edgespec.cli.console import counted
from edgespec.cli.ctrl_c import SAID, Terminated
from edgespec.cli.generate.batched import RowAnswers, Run, reporting_cuts, say_trees
from edgespec.cli.generate.formats import BETWEEN_TURNS
from edgespec.cli.generate.records import RowRecord, totals
from edgespec.cli.generate.requests import Request
from edgespec.cli.prefill_line import PrefillLine
from edgespec.cli.standard_streams import result_stream
from edgespec.text.results import TextChunk


def stream_one(run: Run, request: Request) -> int:
    """Write one prompt's answers to stdout as they are verified, and return the exit status; raises EdgespecError."""
    shown = _Shown(run, request, to_stdout=True)
    try:
        shown.answer()
    except (KeyboardInterrupt, Terminated) as error:
        run.console.say(f"\nstopped: interrupted after {counted(shown.num_tokens, 'token')} · seed {request.seed}")
        error.add_note(SAID)
        raise
    finally:
        shown.end()
    results = shown.row.results
    run.console.say(f"{totals(results).in_words()} · stopped: {results[-1].finish_reason} · seed {request.seed}")
    return 0


def one_by_one(run: Run, requests: Sequence[Request], *, to_stdout: bool) -> Generator[RowRecord, None, None]:
    """Yield each prompt's record when its text was shown."""
    for number, request in enumerate(requests, 1):
        run.check()
        label = f"[{number}/{len(requests)}] id={request.row.id}"
        run.console.say(label)
        shown = _Shown(run, request, label=label, to_stdout=to_stdout)
        try:
            shown.answer()
        except OSError:
            raise  # of our own output: what the engine reads comes as EdgespecError
        except Exception as error:
            yield run.record(request, shown.row.results, error)
        else:
            yield run.record(request, shown.row.results)
        finally:
            shown.end()


class _Shown:
    """A prompt whose text is shown while it is made."""

    def __init__(self, run: Run, request: Request, *, label: str = "", to_stdout: bool) -> None:
        self.num_tokens = 0
        self._run, self._to_stdout = run, to_stdout
        self._prefill = PrefillLine(run.console, label=f"{label}: " if label else "")
        self.row = RowAnswers(run, request, on_prefill=self._prefill.update)
        self._reader: AnswerReader | None = None

    def answer(self) -> None:
        """Answer all turns, a blank line between two answers; the row has the finished ones if a later one fails."""
        row = self.row
        with reporting_cuts(self._run):
            while not row.is_done:
                handle = row.next_turn()
                self._reader = self._new_reader()
                for chunk in handle:
                    self._show(chunk)
                if self._reader is not None:
                    self._write(shown_parts(self._reader.end()))
                row.take(handle)
                say_trees(self._run, row.results[-1])
                if not row.is_done:
                    self._prefill.begin()
                    self._write(BETWEEN_TURNS)
                    self._run.check()

    def _new_reader(self) -> AnswerReader | None:
        """Return what tells an answer's calls from its words, where there are tools."""
        request, tokenizer = self.row.request, self._run.engine.pair.tokenizer
        return (
            request.toolset.reader(tokenizer, answer_format_of(tokenizer), request.ids)
            if request.toolset.has_parts
            else None
        )

    def end(self) -> None:
        """End the line where text was written."""
        self._prefill.end()
        if self.num_tokens:
            self._write("\n")

    def _show(self, chunk: TextChunk) -> None:
        self._prefill.end()
        self.num_tokens += len(chunk.step.tokens)
        reader = self._reader
        self._write(chunk.text if reader is None else shown_parts(reader.feed(chunk.text)))

    def _write(self, text: str) -> None:
        stream = result_stream() if self._to_stdout else sys.stderr
        stream.write(text)
        stream.flush()
