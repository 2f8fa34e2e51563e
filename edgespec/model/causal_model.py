"""One transformers model that reads rows of many texts in a pass, each with a cache of its own.

This code drives both target and draft; they differ only in the place of their weights. Errors of the offload room
become EdgespecError here. Legend: n new rows of all texts, h the hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import offload_errors
from edgespec.model.adapted_rows import adapted
from edgespec.model.attention import use_own_attention, uses_attention_registry
from edgespec.model.aux_states import AuxStates
from edgespec.model.context_limit import context_of
from edgespec.model.cuda_graphs import CAPACITY_ROWS, CudaGraphPasses, has_static_passes
from edgespec.model.family_logits import decoder_of, family_logits
from edgespec.model.layer_major import LayerMajor, Watch, attention_modules
from edgespec.model.length_rotation import LengthRotation, rotations_of
from edgespec.model.mechanisms.keys_values import STEP_ROWS
from edgespec.model.mechanisms.known import MECHANISMS, attention_layers, read_by
from edgespec.model.mechanisms.mechanism import ModelParts
from edgespec.model.mechanisms.waiting_keys import KeyStream
from edgespec.model.mechanisms.windows import key_sources, layer_reaches
from edgespec.model.pass_cache import PassCache, cache_argument
from edgespec.model.pass_rows import FewRows, PassRows, Span, chunks_of, next_rows
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.seen_rows import decoder_inputs, embedded_rows, position_ids
from edgespec.model.text_cache import TextCache, UncachedText
from edgespec.to_device import on_device
from offload.adapters.use import AdapterUse, Run
from offload.text_part import decoder_layers, language_model

if TYPE_CHECKING:
    from edgespec.model.native.passes import NativePasses

CHUNK_ROWS = 512  # rows that pass a layer at once, and attention always


def chunk_rows_on(device: torch.device) -> int:
    """Return the rows that pass attention at once, and at whose multiples prompts are cut.

    On a processor fewer are as fast, or faster where layers see windows, and others wait for half as long.
    """
    return CHUNK_ROWS // 2 if device.type == "cpu" else CHUNK_ROWS


def shares_passes(config: PretrainedConfig) -> bool:
    """Return whether texts may share a pass: not where the rotation of one depends on the longest of all."""
    return not rotations_of(config)


def by_adapters(parts: Sequence[PassRows]) -> list[int]:
    """Return the order of texts in which those with the same adapters follow each other, so that rows are one run."""
    uses = list(dict.fromkeys(part.cache.adapters for part in parts))
    return sorted(range(len(parts)), key=lambda number: uses.index(parts[number].cache.adapters))


def is_text_by_text(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Return whether each text passes a layer by itself.

    That is needed by families that bypass the registry, and where the cache gets other rows than attention does.
    """
    return any(record.is_text_by_text(config) for record in MECHANISMS) or not uses_attention_registry(model)


def takes_more_rows_than_attention(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Return whether more rows may pass a layer at once than pass its attention."""
    layers = decoder_layers(model)[1]
    return not is_text_by_text(model, config) or bool(attention_modules(layers, attention_layers(config)))


class CausalModel:
    """A model whose passes append rows to texts."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        device: torch.device,
        chunk_rows: int = CHUNK_ROWS,
        keeps_hidden: bool | AuxStates = False,
        cuda_graphs: bool = False,
        keeps_row_bits: bool = False,
        never_drawn: Collection[int] = (),
    ) -> None:
        """With `keeps_hidden`, texts keep the last hidden states of their rows: `TextCache.features_before`.

        Where these are `AuxStates`, the texts keep features that are made of hidden states between layers instead.
        With `cuda_graphs`, few rows of one text are read in shapes that repeat, where the family allows it.
        With `keeps_row_bits`, attention gives a tree's rows the bits of plain decoding.
        The ids `never_drawn` are only kept here: code that makes distributions of the logits leaves them out.
        """
        self._take(model, device=device, never_drawn=never_drawn)
        self.layer_rows = chunk_rows  # that pass a layer at once, if more than pass attention at once
        self.few_rows: FewRows | None = None  # None: which are few is left to the weights
        self._keeps_hidden, self._chunk_rows = keeps_hidden is not False, chunk_rows
        self._aux_states = keeps_hidden if isinstance(keeps_hidden, AuxStates) else None
        self._decoder = decoder_of(model)
        self._words = language_model(model)  # whose forward takes words alone
        self.rotation = LengthRotation(self._decoder, self.config)
        windows = layer_reaches(self.config)
        if getattr(model, "hides_first_row", False):  # a draft that has no feature for a text's first token
            windows = [replace(window, first=1) for window in windows]
        block = getattr(model, "block", None)  # of a drafter that guesses several places at once
        if block is not None:
            pairs = zip(windows, block.causal_layers, strict=True)
            windows = [replace(window, is_causal=is_causal) for window, is_causal in pairs]
        self._cache = PassCache()
        self._cache.text_by_text = is_text_by_text(model, self.config)
        self._layers = decoder_layers(model)[1]
        parts = ModelParts(
            decoder=self._decoder, layers=self._layers, config=self.config, keeps_row_bits=keeps_row_bits
        )
        records = read_by(self.config)
        self._give_back = [record.install(parts) for record in records]
        self._cache_argument = cache_argument(type(self._decoder).forward)
        self._shares_passes = shares_passes(self.config)
        self._layers_take_more = takes_more_rows_than_attention(model, self.config)
        if not self._cache.text_by_text:
            use_own_attention(self._decoder, self.config, keeps_row_bits=keeps_row_bits, windows=windows)
        # Four dimensions: transformers takes it for a finished mask.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=device)
        self._layer_major = LayerMajor(
            self._layers,
            mask=self._mask,
            windows=windows,
            sources=key_sources(self.config),
            masked_layers=attention_layers(self.config) if self._cache.text_by_text else (),
            needs_mask=not any(record.needs_no_mask for record in records),
            aux_layers=() if self._aux_states is None else self._aux_states.layers,
        )
        can_use_cuda_graphs = not self._cache.text_by_text and self._shares_passes and has_static_passes(self.config)
        can_use_cuda_graphs &= block is None  # its rows have masks of their own
        self._native: NativePasses | None = None
        self._layer_windows = windows
        self._static = CudaGraphPasses(self._run, dtype=model.dtype) if cuda_graphs and can_use_cuda_graphs else None

    def _take(self, model: PreTrainedModel, *, device: torch.device, never_drawn: Collection[int] = ()) -> None:
        """Take what is known of the model, however its rows are read."""
        self.model = model
        self.device = device
        self.config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        self.vocab: int = getattr(head, "num_tokens", None) or head.weight.shape[0]
        input_table = model.get_input_embeddings().weight
        assert isinstance(input_table, Tensor)
        self.num_embeddings = input_table.shape[0]
        self.never_drawn = on_device([token for token in sorted(never_drawn) if token < self.vocab], device)
        self.watch: Watch | None = None  # called before each chunk of a layer
        self.default_adapters: AdapterUse = ()  # of rows whose text names none
        self.follows_adapters = False  # whether a draft's rows have those of their text, as the target's
        self.waiting: KeyStream | None = None  # of layers whose keys and values wait in RAM, for texts from now on
        self.is_exact = False  # whether rows of texts have the bits of plain decoding in any company

    def close(self) -> None:
        """Restore the layers, so that nothing keeps their weights alive."""
        self._layer_major.close()
        self.rotation.close()
        for give_back in self._give_back:
            give_back()

    @property
    def max_context(self) -> int | None:
        """The number of tokens that fit the model's positions; None where the family sets no limit."""
        return context_of(self.config)

    def use_native_passes(self) -> None:
        """Let rows of trees, and few rows of texts, pass all layers in one native call, where their parts allow it.

        The layers stay in a processor's memory, and `trial.py` has shown that the family is computed so.
        """
        from edgespec.model.native.passes import native_passes  # needs llvmlite

        keeps_rows = not any(record.is_text_by_text(self.config) for record in MECHANISMS)
        if keeps_rows and (self._shares_passes or self.rotation.two_lengths):
            layers = list(self._layers)
            self._native = native_passes(self.model, self._decoder, layers, self._layer_windows, self.rotation)

    def drop_native_passes(self) -> None:
        """Let all rows pass by torch's operations again."""
        self._native = None

    def read_exactly(self) -> None:
        """Give rows of texts the bits that they have in any company: their spans pass layers, and what follows, alone.

        Those of trees share chunks as before.
        """
        self.is_exact, self._native = True, None
        self._give_back.append(self._layer_major.in_chunks_too(self._decoder))

    @property
    def native_bytes(self) -> int:
        """The bytes that passes in one native call hold now."""
        return 0 if self._native is None else self._native.held_bytes

    @property
    def is_native(self) -> bool:
        """Whether rows of trees pass all layers in one native call."""
        return self._native is not None

    @property
    def is_plain(self) -> bool:
        """Whether passes are the family's own, which follow no branches and return logits in place of hidden states."""
        return False

    @property
    def reads_whole(self) -> bool:
        """Whether a prompt's rows belong into one pass: here any part of them may follow another."""
        return False

    @property
    def part_rows(self) -> int:
        """The number of tokens at whose multiples a prompt is cut, in one pass or between two."""
        return self._chunk_rows

    def new_text(self, adapters: AdapterUse | None = None) -> TextCache:
        """Return the cache of an empty text, whose rows have these adapters; None: the model's own."""
        return TextCache(
            int(self.config.num_hidden_layers),
            keeps_hidden=self._keeps_hidden,
            step_rows=CAPACITY_ROWS if self._static else STEP_ROWS,
            waiting=self.waiting,
            adapters=self.default_adapters if adapters is None else adapters,
        )

    @torch.no_grad()
    def read(self, parts: Sequence[PassRows]) -> list[Tensor]:
        """Append rows to texts in one pass over the weights, and return their last hidden states [n, h] each."""
        with offload_errors():
            if self._static is not None and self._static.take(parts):
                return [self._static.read(parts[0])]
            if not self._shares_passes:
                return [hidden for part in parts for hidden in self._read_together([part])]
            order = by_adapters(parts)
            found = self._read_together([parts[number] for number in order])
            return [hidden for _, hidden in sorted(zip(order, found, strict=True), key=lambda one: one[0])]

    def _read_together(self, parts: Sequence[PassRows]) -> list[Tensor]:
        return self._read(parts) if self._native is None else self._read_natively(self._native, parts)

    @torch.no_grad()
    def read_text(self, cache: TextCache, ids: Tensor, seen: SeenPrompt | None = None) -> Tensor:
        """Append ids [n] to a text, and return the logits [vocab] of the last row; `seen` are the text's pictures."""
        cache.truncate()  # an interrupted pass may have left rows
        cache.prompt_tokens = cache.length + ids.shape[0]
        (hidden,) = self.read([next_rows(cache, ids, seen=seen)])
        cache.commit_next(ids.tolist())  # the ids of a prompt came from the host: no wait
        return self.logits(hidden[-1:], runs=[(cache.adapters, 1)])[0]

    @torch.no_grad()
    def logits(self, hidden: Tensor, tokens: list[slice] | None = None, *, runs: Sequence[Run] | None = None) -> Tensor:
        """Return the family's own logits [k, vocab] of last hidden states [k, h].

        Where ranges of tokens are given, only their logits are computed. `runs` says which adapters the rows have;
        None: the model's own.
        """
        runs = [(self.default_adapters, hidden.shape[0])] if runs is None else runs
        with offload_errors():
            return adapted(runs, lambda: family_logits(self._words, self._decoder, hidden, tokens))

    @torch.no_grad()
    def features_of_texts(self, ids: Sequence[Tensor], kept: UncachedText | None = None) -> list[Tensor]:
        """Return last hidden states [n, h] of texts [n] each, which are not cached.

        Texts that may share a pass take one over the weights; temporaries are those of some texts at a time. The only
        text is the one `kept`, where it is given: some of its layers keep its rows.
        """
        shared = {source for layer, source in enumerate(key_sources(self.config)) if source != layer}
        adapters = self.default_adapters
        parts = [
            next_rows(kept or UncachedText(shared, prompt_tokens=text.shape[0], adapters=adapters), text)
            for text in ids
        ]
        if not self._shares_passes:
            return [hidden for part in parts for hidden in self._run([part], [[Span(part, 0, part.count)]])]
        chunks: list[list[Span]] = []
        for part in parts:
            is_alone = self._cache.text_by_text or not chunks
            if is_alone or sum(span.count for span in chunks[-1]) + part.count > self._chunk_rows:
                chunks.append([])
            chunks[-1].append(Span(part, 0, part.count))
        return self._run(parts, chunks)

    def states_of_texts(
        self, ids: Sequence[Tensor], layers: Collection[int], kept: UncachedText | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return last hidden states [n, h] of texts that are not cached, one after the other, and their states before.

        These are the residual streams [n, h] that these numbers of layers have passed.
        """
        before, self._layer_major.aux_layers = self._layer_major.aux_layers, frozenset(layers)
        groups = [ids] if self._shares_passes else [[text] for text in ids]
        found: list[Tensor] = []
        states: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        try:
            for group in groups:
                with offload_errors():
                    found += self.features_of_texts(group, kept)
                for layer, rows in self._layer_major.take_aux_states().items():
                    states[layer].append(rows)
        finally:
            self._layer_major.aux_layers = before
        return torch.cat(found), {layer: torch.cat(parts) for layer, parts in states.items()}

    def use_aux_states(self, aux_states: AuxStates) -> None:
        """Make features of other hidden states from now on."""
        self._aux_states, self._layer_major.aux_layers = aux_states, frozenset(aux_states.layers)

    def _read_natively(self, native: NativePasses, parts: Sequence[PassRows]) -> list[Tensor]:
        """Read many rows as a prompt's are read, and few of them natively: a text's bits hang on no company."""
        runs = [native.runs(part, self._chunk_rows) for part in parts]
        found: list[list[Tensor]] = [[] for _ in parts]
        for turn, is_native in enumerate((True, False, True)):
            own = {number: run for number, of_text in enumerate(runs) if (run := of_text[turn]) is not None}
            if not own:
                continue
            rows = list(own.values())
            hidden = self._read_few(native, rows) if is_native else self._read(rows)
            for number, of_run in zip(own, hidden, strict=True):
                found[number].append(of_run)
        return [of_text[0] if len(of_text) == 1 else torch.cat(of_text) for of_text in found]

    def _read_few(self, native: NativePasses, parts: Sequence[PassRows]) -> list[Tensor]:
        self._begin_pass()
        aux_layers = () if self._aux_states is None else self._aux_states.layers
        found, states = native.read(parts, aux_layers)
        kept = found
        if self._aux_states is not None:
            kept = list(self._aux_states.features(states).split([part.count for part in parts]))
        for part, features in zip(parts, kept, strict=True):
            part.cache.write_hidden(part.cache.length - part.count, features)
        return found

    def _begin_pass(self) -> None:
        """Do what the decoder's forward would: its files are looked at, and the pass may be ended."""
        for look in self._decoder._forward_pre_hooks.values():
            look(self._decoder, ())
        if self.watch is not None:
            self.watch(0.0)

    def _read(self, parts: Sequence[PassRows]) -> list[Tensor]:
        first = [part.cache.length for part in parts]
        chunks = chunks_of(
            parts,
            most_rows=self._chunk_rows,
            text_by_text=self._cache.text_by_text,
            layer_rows=self.layer_rows if self._layers_take_more else 0,
            few=self.few_rows,
            exact=self.is_exact,
        )
        with (
            nullcontext() if self.waiting is None else self.waiting.rows([(of.cache.layers, of.count) for of in parts])
        ):
            found = kept = self._run(parts, chunks)
        if self._aux_states is not None:
            features = self._aux_states.features(self._layer_major.take_aux_states())
            kept = list(features.split([part.count for part in parts]))
        for part, start, hidden in zip(parts, first, kept, strict=True):
            part.cache.write_hidden(start, hidden)
        return found

    def _run(self, parts: Sequence[PassRows], chunks: Sequence[Sequence[Span]]) -> list[Tensor]:
        """Return the last hidden states [n, h] of each text's rows."""
        table, inputs = self.model.get_input_embeddings(), {}
        is_seen = any(part.seen is not None and part.seen.embedded is not None for part in parts)
        if parts[0].previous is not None:
            previous = torch.cat([part.previous for part in parts if part.previous is not None])
            embedded = torch.cat([embedded_rows(part, table) for part in parts])
            inputs = {"inputs_embeds": self.model.fuse(embedded, previous)[None]}  # type: ignore[operator]
        elif is_seen:
            inputs = decoder_inputs(parts, self._decoder, table)
        else:
            inputs = {"input_ids": torch.cat([part.ids for part in parts])[None]}
        with self.rotation.of_rows(parts), self._layer_major.rows(chunks, self.watch):
            output = adapted(
                [(part.cache.adapters, part.count) for part in parts],
                lambda: self._decoder(
                    **inputs,
                    attention_mask=self._mask,
                    position_ids=position_ids(parts),
                    use_cache=True,
                    **{self._cache_argument: self._cache},
                ),
            )
        hidden: Tensor = output.last_hidden_state[0]
        return list(hidden.split([part.count for part in parts]))
