"""What a loaded model sees with: its family's whole model, in whose place of a decoder the loaded one stands.

The tower's weights are read when a picture comes that is not known yet: once for all such pictures of the texts that
begin, which pass it block by block, each by itself (`layer_rounds.py`). What the tower said of a picture is kept by its
digest, so that a further question about it runs no tower, whatever pictures stand beside it.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import offload_errors
from edgespec.model.attention import NAME
from edgespec.model.causal_model import CausalModel
from edgespec.model.layer_rounds import CallsUnderWay, LayerRounds
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seeing import refused, see
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.tower_calls import (
    Digests,
    TowerCall,
    bytes_of,
    calls_of,
    joined,
    keys_of_calls,
    num_pixels,
    num_rows_of,
    without_layers,
)
from offload.pages import give_back_heap
from offload.skeleton import build_on_meta
from offload.text_part import decoder_layers
from offload.tower import Tower, TowerRecord

MOST_KEPT_BYTES = 32 << 20  # of what towers said
MOST_RUN_BYTES = 64 << 20  # of the pixels that pass a tower together
PICTURE_ROWS = 4096  # patches of pictures that pass a block of a tower at once
USUAL_PATCH = 14  # pixels that a patch is wide, where the family does not say it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """Pictures of texts that wait, on their way through the tower."""

    prompts: Sequence[PicturePrompt]
    calls: Mapping[Digests, TowerCall]
    under_way: CallsUnderWay[Any]
    undo: ExitStack  # which lets the tower go


class Sight:
    """The eyes of one loaded model."""

    def __init__(
        self,
        causal: CausalModel,
        record: TowerRecord | None,
        *,
        is_resident: bool,
        check: Callable[[PretrainedConfig, PicturePrompt], None],
    ) -> None:
        """See for a model, whose tower is at `record`; None where its folder has none.

        `check` tries the family before the first picture, and raises EdgespecError where it is read wrongly.
        """
        self._causal, self._record, self._is_resident, self._check = causal, record, is_resident, check
        self._tower: Tower | None = None
        self._rounds = LayerRounds()
        self._kept: OrderedDict[Digests, Any] = OrderedDict()  # what the tower said of pictures, the latest last
        self._awaited: set[Digests] = set()  # those that a prompt has not taken yet
        self._asks_together = False  # of all pictures of a prompt, since of each alone it says something else
        self._ahead: _Ahead | None = None  # pictures of texts that wait
        self._fails_ahead = False  # since the last time that pictures did not pass ahead
        self.looks_ahead = False  # whether somebody calls `go_on` while passes wait for weights
        self.num_runs = 0  # of the tower
        self.num_pictures = 0  # that passed it; of a prompt whose pictures are asked of together, one

    @property
    def is_awake(self) -> bool:
        """Whether weights of the tower are in memory, or what it said waits for a prompt."""
        return (self._tower is not None and self._tower.is_present) or bool(self._awaited)

    @property
    def kept_bytes(self) -> int:
        """The bytes of what is kept of earlier pictures."""
        return sum(bytes_of(said) for said in self._kept.values())

    @property
    def tower_read_bytes(self) -> int:
        """The bytes of the tower's weights that were read so far."""
        return 0 if self._tower is None else self._tower.num_read_bytes

    def look(self, prompts: Sequence[PicturePrompt]) -> None:
        """Let new pictures of several prompts pass the tower together, before each of them is seen.

        Raises EdgespecError where they are not read.
        """
        with offload_errors():
            waiting = list(prompts)
            while waiting:
                together = _of_one_run(waiting)
                self._look(together)
                del waiting[: len(together)]

    def look_ahead(self, prompts: Sequence[PicturePrompt]) -> None:
        """Begin to let new pictures of texts that wait pass the tower, where passes wait for weights meanwhile.

        What fails is tried again, and raised, when their texts begin.
        """
        if not self.looks_ahead or self._ahead is not None:
            return
        self._awaited.clear()  # of texts that have left since
        self._await(prompts)
        seeing = [prompt for prompt in prompts if prompt.image_rows]
        unknown = [prompt for prompt in seeing if not self._knows(prompt)]
        if unknown and not self._fails_ahead:
            try:
                self._ahead = self._begin_ahead(_of_one_run(unknown))
            except Exception:
                self._fails_ahead = True

    def go_on(self) -> bool:
        """Let one picture of those that pass the tower ahead pass one more block; return whether any does."""
        ahead = self._ahead
        if ahead is None:
            return False
        try:
            if ahead.under_way.go_on():
                return True
            self._fails_ahead = not self._keep(ahead.calls, ahead.under_way.results)
            self._await(ahead.prompts)
        except Exception:
            self._fails_ahead = True
        except BaseException:
            self._end_ahead()
            raise
        self._end_ahead()
        return False

    def see(self, prompt: PicturePrompt) -> SeenPrompt:
        """Return what the decoder gets of a prompt with pictures; raises EdgespecError where they are not read."""
        with offload_errors():
            self._look([prompt])
            keys = self._keys(prompt)
            said = [self._kept[key] for key in keys if key in self._kept]  # of a prompt without pictures nothing
            found = self._with_features(prompt, lambda **_: joined(said))
            self._awaited.difference_update(keys)
            self._forget_most()
            return found

    def rest(self) -> None:
        """Let the tower's weights go: nothing waits that has pictures."""
        self._end_ahead()
        self._awaited.clear()
        self._forget_most()
        if self._tower is not None:
            self._tower.drop()

    def forget(self) -> None:
        """Forget what was seen."""
        self._kept.clear()

    def _begin_ahead(self, prompts: Sequence[PicturePrompt]) -> _Ahead:
        calls = self._new_calls(prompts)
        asked, tower = self._asked(calls, prompts[0])
        under_way = self._rounds_of(calls, asked)
        with ExitStack() as undo:
            undo.enter_context(tower.loaded())
            undo.callback(under_way.leave)
            return _Ahead(prompts=prompts, calls=calls, under_way=under_way, undo=undo.pop_all())

    def _end_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.undo.close()

    def _opened(self, prompt: PicturePrompt) -> tuple[PreTrainedModel, Tower]:
        """Return the family's whole model, and its tower; they are made when the first picture comes."""
        if self._tower is None:
            if self._record is None:
                raise refused(self._causal.model.config, "its files have no tower for images that could be read")
            self._check(self._causal.model.config, prompt)
            self._model = whole_model(self._causal.model, self._causal.device)
            self._tower = Tower(
                self._model, self._record, self._causal.device, is_resident=self._is_resident,
                on_block=self._rounds.arrive,
            )  # fmt: skip
        return self._model, self._tower

    def _keys(self, prompt: PicturePrompt) -> list[Digests]:
        """Return by which pictures a prompt's answers are kept."""
        together = keys_of_calls(prompt, together=True)
        alone = keys_of_calls(prompt, together=self._asks_together)
        return together if together[0] in self._kept else alone

    def _knows(self, prompt: PicturePrompt) -> bool:
        """Return whether what the tower says of all pictures of a prompt is kept."""
        return all(key in self._kept for key in self._keys(prompt))

    def _look(self, prompts: Sequence[PicturePrompt]) -> None:
        """Let the pictures that are not known pass the tower: block by block, each by itself."""
        if not all(map(self._knows, prompts)):
            while self.go_on():  # they may be among those ahead, and the tower is theirs until they are through
                pass
        self._fails_ahead = False
        if calls := self._new_calls(prompts):
            asked, tower = self._asked(calls, prompts[0])
            with torch.no_grad(), tower.loaded():
                said = self._rounds_of(calls, asked).finish() if len(asked) > 1 else [asked[0]()]
            if not self._keep(calls, said):
                self._look(prompts)
                return
        self._await(prompts)

    def _new_calls(self, prompts: Sequence[PicturePrompt]) -> dict[Digests, TowerCall]:
        """Return what the tower is to be asked of prompts' pictures that are not known."""
        calls: dict[Digests, TowerCall] = {}
        for prompt in prompts:
            if not self._knows(prompt):
                for call in self._calls(prompt):
                    calls.setdefault(call.key, call)
        return {key: call for key, call in calls.items() if key not in self._kept}

    def _asked(
        self, calls: Mapping[Digests, TowerCall], prompt: PicturePrompt
    ) -> tuple[list[Callable[[], Any]], Tower]:
        """Return functions that ask the tower, and the tower."""
        model, tower = self._opened(prompt)
        outer: Any = model.base_model
        return [partial(outer.get_image_features, **call.arguments) for call in calls.values()], tower

    def _rounds_of(self, calls: Mapping[Digests, TowerCall], asked: Sequence[Callable[[], Any]]) -> CallsUnderWay[Any]:
        """Return the rounds in which pictures pass the tower: on a processor several at once, which share its threads.

        Two threads are done with a block of two pictures before both together are with one after the other.
        """
        device = self._causal.device
        if device.type != "cpu":
            return self._rounds.begin(asked, device=device)
        size = max(map(num_pixels, calls.values())) // _pixels_of_row(self._causal.model.config)
        at_once = max(1, min(len(asked), torch.get_num_threads(), PICTURE_ROWS // max(1, size)))
        num_threads = torch.get_num_threads() // at_once
        return self._rounds.begin(
            asked, device=device, on_turn=give_back_heap, at_once=at_once, num_threads=num_threads
        )  # each picture's thread has a heap of its own

    def _keep(self, calls: Mapping[Digests, TowerCall], said: Sequence[Any]) -> bool:
        """Keep what the tower said; False where it says something else of pictures alone than of all of a prompt."""
        self.num_runs += 1
        self.num_pictures += len(calls)
        is_right = [num_rows_of(one) == call.num_rows for one, call in zip(said, calls.values(), strict=True)]
        if not self._asks_together and not all(is_right):
            self._asks_together = True
            return False
        self._kept |= {key: without_layers(one) for key, one in zip(calls, said, strict=True)}
        return True

    def _await(self, prompts: Sequence[PicturePrompt]) -> None:
        """Keep what is known of pictures until these prompts have taken it."""
        for key in [key for prompt in prompts for key in self._keys(prompt) if key in self._kept]:
            self._awaited.add(key)
            self._kept.move_to_end(key)

    def _calls(self, prompt: PicturePrompt) -> list[TowerCall]:
        """Return the calls of the tower for a prompt's pictures."""
        try:
            self._with_features(prompt, _ask)
        except _Asked as asked:
            return calls_of(prompt, asked.arguments, together=self._asks_together)
        return []

    def _with_features(self, prompt: PicturePrompt, features: Callable[..., Any]) -> SeenPrompt:
        """Return what the decoder gets, where a function says what the tower says, by its arguments' names."""
        model, _ = self._opened(prompt)
        outer: Any = model.base_model
        arguments = inspect.signature(outer.get_image_features)

        def said(*given: Any, **named: Any) -> Any:
            found = arguments.bind(*given, **named).arguments
            return features(**{**found.pop("kwargs", {}), **found})

        vars(outer)["get_image_features"] = said
        try:
            return see(model, prompt)
        finally:
            del vars(outer)["get_image_features"]

    def _forget_most(self) -> None:
        """Forget the earliest pictures that no prompt waits for, until what is kept has room."""
        for key in [key for key in self._kept if key not in self._awaited]:
            if self.kept_bytes <= MOST_KEPT_BYTES or len(self._kept) == 1:
                return
            del self._kept[key]


def _of_one_run(prompts: Sequence[PicturePrompt]) -> Sequence[PicturePrompt]:
    """Return the first prompts, as many as may pass a tower together."""
    num_bytes = accumulate(prompt.input_bytes for prompt in prompts)
    return prompts[: max(1, sum(total <= MOST_RUN_BYTES for total in num_bytes))]


def _pixels_of_row(config: PretrainedConfig) -> int:
    """Return the numbers that a tower's row is made of at the least."""
    patch = getattr(getattr(config, "vision_config", None), "patch_size", None)
    width = min(patch) if isinstance(patch, list | tuple) else patch or USUAL_PATCH
    return 3 * int(width) ** 2


class _Asked(Exception):  # noqa: N818 - it is no error
    """Ends a family's forward at its tower, with what that was asked."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _ask(**arguments: Any) -> NoReturn:
    raise _Asked(arguments)


def whole_model(loaded: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a family's model without weights but for the decoder, which is the loaded one, and the table of words."""
    config: PretrainedConfig = copy.deepcopy(loaded.config)
    model = build_on_meta(config, "its config.json", dtype=loaded.dtype)
    outer: Any = model.base_model
    outer.__class__ = _on_device(type(outer), device)
    path = decoder_layers(loaded)[0].rpartition(".")[0]
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, loaded.get_submodule(path))
    model.set_input_embeddings(loaded.get_input_embeddings())
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
    # Attention is ours, and makes its own masks: a family's would have rows x rows numbers.
    model.config.get_text_config(decoder=True)._attn_implementation = NAME
    return model


def _on_device(family: type[PreTrainedModel], device: torch.device) -> type[PreTrainedModel]:
    """Return a family's class that is on a device also while none of its weights are in memory."""
    names = {"__module__": family.__module__, "__qualname__": family.__qualname__}  # by which transformers knows it
    return type(family.__name__, (family,), {**names, "device": property(lambda _self: device)})
