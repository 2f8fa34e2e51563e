"""A model whose texts grow by a token or by a chain a pass, with transformers' own forward, masks, positions and cache.

That is for families whose cache can follow no tree with branches. Texts share each pass all the same: each has a
cache of its own, and passes a layer while the layer's weights are there (`edgespec.model.layer_rounds`). What a pass
returns are logits: after each row of a chain, and after the last of other rows. Legend: n rows of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from edgespec.errors import offload_errors
from edgespec.model.adapted_rows import adapted
from edgespec.model.causal_model import CausalModel, chunk_rows_on
from edgespec.model.layer_rounds import LayerRounds
from edgespec.model.length_rotation import LengthRotation
from edgespec.model.own_pass_text import OwnPassText, record_rows
from edgespec.model.pass_cache import cache_argument
from edgespec.model.pass_rows import PassRows
from edgespec.model.text_cache import UncachedText
from offload.adapters.use import AdapterUse, Run
from offload.text_part import decoder_layers, language_model

# Families that keep a text's state in attributes of their modules, and not in a cache
IN_MODULES = {"recurrent_gemma": ("conv1d_state", "recurrent_states")}

# Families that read the whole text in each pass: one keeps no cache, and BLT's has only the last byte of what its
# patches are made of, so that transformers' own generate is right with `use_cache=False` alone
UNCACHED = {"blt", "openai-gpt"}

# The text whose forward runs in this thread; None outside a pass of ours
_text_under_way: ContextVar[OwnPassText | None] = ContextVar("text_under_way", default=None)

SharedLayers = Callable[[], AbstractContextManager[None]]


class OwnPassModel(CausalModel):
    """A model whose passes append rows to texts: one after the last, a chain's, or a prompt's at once."""

    def __init__(
        self, model: PreTrainedModel, *, device: torch.device, reads_on: bool, share_layers: SharedLayers = nullcontext
    ) -> None:
        """`reads_on` says that several rows may follow others; else such a text is read anew from its first token.

        Within `share_layers` a layer's weights stay until another layer is called.
        """
        self._take(model, device=device)
        self.rotation = LengthRotation(nn.Module(), self.config)  # transformers' own rotations follow the text
        self._chunk_rows = chunk_rows_on(device)
        self._reads_on, self._share_layers = reads_on, share_layers
        self._rounds = LayerRounds()
        self._layers = decoder_layers(model)[1]
        self._words: Any = language_model(model)  # whose forward takes words alone
        self._keeps_cache = self.config.model_type not in UNCACHED
        self._takes = frozenset(signature(type(self._words).forward).parameters)
        names = IN_MODULES.get(self.config.model_type, ())
        self._keeping = [(part, name) for part in self._layers.modules() for name in names if hasattr(part, name)]
        # In front of the hook that brings the weights: of several texts only the first one's turn needs it.
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._arrive, index), prepend=True)
            for index, layer in enumerate(self._layers)
        ]
        if getattr(self.config, "rescale_every", None):  # RWKV's halving of weights, which would change streamed ones
            self.config.rescale_every = 0

    def close(self) -> None:
        """Unhook the layers."""
        for hook in self._hooks:
            hook.remove()

    @property
    def is_plain(self) -> bool:
        """Return True."""
        return True

    @property
    def reads_whole(self) -> bool:
        """Whether a prompt's rows belong into one pass: a second one would read the first one's again."""
        return not self._reads_on

    def new_text(self, adapters: AdapterUse | None = None) -> OwnPassText:
        """Return the cache of an empty text, whose rows have these adapters; None: the model's own."""
        return OwnPassText(self.default_adapters if adapters is None else adapters)

    @torch.no_grad()
    def read(self, parts: Sequence[PassRows]) -> list[Tensor]:
        """Append rows to texts in one pass over the weights, and return the logits after each one's last: [1, vocab].

        Of a chain they are those after all its rows: [n, vocab].
        """
        with offload_errors(), self._share_layers():
            if len(parts) == 1:
                return [self._forward(parts[0])]
            calls = [partial(self._forward, part) for part in parts]
            return self._rounds.run(calls, device=self.device, on_round=self._look)

    def logits(self, hidden: Tensor, tokens: list[slice] | None = None, *, runs: Sequence[Run] | None = None) -> Tensor:
        """Return the logits, which a pass has returned already, or those of some ranges of tokens."""
        del runs
        return hidden if tokens is None else torch.cat([hidden[:, which] for which in tokens], -1)

    def features_of_texts(self, ids: Sequence[Tensor], kept: UncachedText | None = None) -> list[Tensor]:
        """Raise NotImplementedError: passes give logits, so that training on hidden states is refused beforehand."""
        raise NotImplementedError

    def _forward(self, part: PassRows) -> Tensor:
        """Return the logits after a text's new rows, which its cache takes: [1, vocab], or of a chain [n, vocab]."""
        text = part.cache
        assert isinstance(text, OwnPassText)
        num_logits = 1
        if part.visible is not None:
            num_logits = part.count
            assert part.visible.equal(torch.ones_like(part.visible).tril()), "branches for a model that follows none"
        ids = torch.cat([part.ids.new_tensor(list(text.ids)), part.ids])[None]  # [1, all rows]
        if part.count > 1 and not self._reads_on:
            text.drop_cache()
        is_first = text.num_read == 0 or not self._keeps_cache
        given = self._options(ids, num_logits)
        options = given | (self._new_cache() if is_first else text.carried)
        if part.visible is not None:
            record_rows(options.values())
        text.begin_pass()
        with self._in_modules(text):
            inputs = self._words.prepare_inputs_for_generation(
                ids, next_sequence_length=None if is_first else part.count, is_first_iteration=is_first, **options
            )
            output = adapted([(text.adapters, part.count)], lambda: self._words(**inputs, return_dict=True))
        carried = self._words._update_model_kwargs_for_generation(output, options)
        text.end_pass({name: value for name, value in carried.items() if name not in given}, ids.shape[1])
        logits: Tensor = output.logits[0, -num_logits:]
        return logits

    def _options(self, ids: Tensor, num_logits: int) -> dict[str, Any]:
        """Return what transformers' generate gives a forward beside ids [1, n] and a cache."""
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": self._keeps_cache}
        if "position_ids" in self._takes:
            # Reformer has none here: it counts for itself
            options["position_ids"] = self._words._prepare_position_ids_for_generation(ids, options)
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = num_logits
        return options

    def _new_cache(self) -> dict[str, Any]:
        """Return an empty cache under the name that the family has for it; nothing where it makes its own."""
        name = cache_argument(type(self._words).forward)
        has_own = name not in self._takes or not self._words._supports_default_dynamic_cache()
        return {} if has_own or not self._keeps_cache else {name: DynamicCache(config=self.config)}

    def _look(self, layer: int) -> None:
        """Report where a pass is; what that raises ends the pass."""
        if self.watch is not None:
            self.watch(min(1.0, layer / len(self._layers)))  # some families pass their layers several times

    def _arrive(self, layer: int, _module: nn.Module, _arguments: Any) -> None:
        """Let the other texts of the pass come to this layer too."""
        text = _text_under_way.get()
        if text is None:
            return  # not our pass
        self._take_out(text)
        if not self._rounds.arrive():
            self._look(layer)
        self._put_in(text)

    @contextmanager
    def _in_modules(self, text: OwnPassText) -> Iterator[None]:
        """Within this block the family's modules keep the state of this text, wherever it has the turn."""
        token = _text_under_way.set(text)
        self._put_in(text)
        try:
            yield
            self._take_out(text)
        finally:
            _text_under_way.reset(token)

    def _put_in(self, text: OwnPassText) -> None:
        for (module, name), value in zip(self._keeping, text.modules or [None] * len(self._keeping), strict=True):
            setattr(module, name, value)

    def _take_out(self, text: OwnPassText) -> None:
        text.modules = [getattr(module, name) for module, name in self._keeping]
