"""Samples of requests: token ids and labels, of which the assistant's tokens count. No torch.

Two ways lead to labels. A template that marks the assistant's turns gives one sample of all turns;
every token that overlaps a mark counts, as in TRL with ``assistant_only_loss``. Otherwise each turn
of the assistant is a sample of its own. Its prompt is the rendering of the turns before it with
the header of the assistant's turn. The prompt must be a prefix of the rendering cut after the turn.
Tokens count behind the common prefix of both encodings, as in TRL with ``completion_only_loss``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL
from penstock.models.data.chat.encoder import Encoder, Encoding, Passage, Span
from penstock.models.data.chat.presence import Presence
from penstock.models.data.chat.remarks import Remark
from penstock.models.data.chat.requests import (
    ASSISTANT,
    USER,
    ChatRequest,
    CompletionRequest,
    IdsRequest,
    PairRequest,
    Request,
    TextRequest,
    shown,
)
from penstock.models.data.chat.templates import Conversation, Rendering, Template, first_difference


class TrainOn(Enum):
    """Values of ``data.train_on``. ``AUTO`` takes all of a text, the completion of a prompt, and
    the assistant's turns of a conversation.
    """

    AUTO = "auto"
    ALL = "all"
    COMPLETION = "completion"
    ASSISTANT = "assistant"
    LAST = "last"


class Turns(Enum):
    """Values of ``data.turns``: one sample of all turns, or one of each turn of the assistant.
    ``AUTO`` takes one sample where the template marks turns.
    """

    AUTO = "auto"
    ALL = "all"
    EACH = "each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The user's choices for samples.

    ``end`` is the text of the end token behind a plain text or completion; None adds no token.
    ``special_in_text`` makes special tokens of their texts in messages, as TRL does.
    """

    train_on: TrainOn = TrainOn.AUTO
    turns: Turns = Turns.AUTO
    end: str | None = None
    special_in_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A sample before its encoding.

    ``spans`` are the characters of tokens that count, in order; None stands for all characters.
    ``prompt`` is the passage at the front of the sample that does not count. ``weight`` is the
    factor of its losses. ``remarks`` are for the user.
    """

    passage: Passage
    spans: tuple[Span, ...] | None = None
    prompt: Passage | None = None
    weight: float = 1.0
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Token ids, and the spans of tokens that count. ``weights``: the factor of each token's loss;
    None: ``weight`` for all.

    ``lost`` is the number of the prompt's last tokens that the sample does not have, since tokens
    of prompt and completion merged. ``remarks`` are for the user.
    """

    place: str
    ids: list[int]
    counted: tuple[Span, ...]
    lost: int = 0
    weight: float = 1.0
    weights: tuple[float, ...] | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def labels(self) -> list[int]:
        """The ids of tokens that count, and -100 for others. Labels are not shifted."""
        labels = [IGNORED_LABEL] * len(self.ids)
        for first, end in self.counted:
            labels[first:end] = self.ids[first:end]
        return labels


Prepared: TypeAlias = Draft | Sample


def samples_of(
    requests: Iterable[Request],
    encoder: Encoder,
    template: Template | None = None,
    choices: Choices | None = None,
) -> list[Sample]:
    """Returns the samples of requests, in order; a request has one, several or none.

    A conversation has none if ``train: false`` stands in all its messages.

    Raises:
        ConfigError: a request does not fit the choices, or the template refuses a conversation.
    """
    choices = choices or Choices()
    prepared = [p for request in requests for p in drafts_of(request, encoder, template, choices)]
    return encoded(prepared, encoder)


def drafts_of(
    request: Request, encoder: Encoder, template: Template | None, choices: Choices
) -> list[Prepared]:
    """Returns the samples of a request before their encoding.

    Raises:
        ConfigError: the request does not fit the choices, or the template refuses it.
    """
    match request:
        case IdsRequest():
            return [_ready(request, choices)]
        case TextRequest():
            _check_choice(request.place, "a text", choices, (TrainOn.ALL,))
            return [Draft(passage=_plain(request.place, request.text, choices.end))]
        case CompletionRequest():
            return [_completion(request, choices)]
        case ChatRequest():
            return list(_Chat.of(request, encoder, template, choices).drafts())
        case PairRequest():
            answers = (request.chosen, request.rejected)
            choices = dataclasses.replace(choices, train_on=TrainOn.COMPLETION)
            return [d for each in answers for d in drafts_of(each, encoder, template, choices)]


def prompt_of(
    request: ChatRequest, encoder: Encoder, template: Template | None, choices: Choices
) -> Passage:
    """Returns the rendering of a conversation with the header of the assistant's next turn.

    A training sample of that turn begins with the same text.

    Raises:
        ConfigError: the template refuses the conversation, or the last turn is the assistant's.
    """
    if choices.train_on is TrainOn.COMPLETION:
        request = dataclasses.replace(request, prompt_turns=len(request.turns))
    return _Chat.of(request, encoder, template, choices).prompt()


def encoded(prepared: Sequence[Prepared], encoder: Encoder) -> list[Sample]:
    """Returns samples with ids; one call of the library encodes all of them.

    Raises:
        ConfigError: a text cannot be encoded.
    """
    drafts = [item for item in prepared if isinstance(item, Draft)]
    prompts = [draft.prompt for draft in drafts if draft.prompt is not None]
    encodings = encoder.encode(
        [*(draft.passage for draft in drafts), *prompts],
        [*(draft.spans is not None for draft in drafts), *(False for _ in prompts)],
    )
    texts, prompt_texts = iter(encodings[: len(drafts)]), iter(encodings[len(drafts) :])
    samples = []
    for item in prepared:
        if isinstance(item, Draft):
            prompt = None if item.prompt is None else next(prompt_texts)
            samples.append(_sample(item, next(texts), prompt))
        else:
            samples.append(item)
    return samples


def _sample(draft: Draft, text: Encoding, prompt: Encoding | None) -> Sample:
    """Returns the sample of a draft and of its encodings."""
    spans = [(0, len(text.ids))]
    if draft.spans is not None:
        spans = [text.tokens(first, last) for first, last in draft.spans]
    start = lost = 0
    if prompt is not None:
        start = first_difference(prompt.ids, text.ids)
        lost = len(prompt.ids) - start
    clipped = ((max(first, start), end) for first, end in spans)
    counted = tuple((first, end) for first, end in clipped if first < end)
    return Sample(
        place=draft.passage.place,
        ids=text.ids,
        counted=counted,
        lost=lost,
        weight=draft.weight,
        remarks=draft.remarks,
    )


def with_one_start(chosen: Sample, rejected: Sample) -> tuple[Sample, Sample]:
    """Returns the samples of a pair, which count from the same place on. As in TRL, it is the first
    place at which one of them differs from the tokens of the prompt.
    """
    starts = [s.counted[0][0] if s.counted else len(s.ids) for s in (chosen, rejected)]
    start = min(starts)
    first, second = (
        dataclasses.replace(
            sample,
            counted=((start, len(sample.ids)),) if start < len(sample.ids) else (),
            lost=sample.lost + begin - start,
        )
        for sample, begin in zip((chosen, rejected), starts, strict=True)
    )
    return first, second


def _plain(place: str, text: str, end: str | None, *, prompt: bool = False) -> Passage:
    """Returns the passage of a plain text, with the end token unless the text has it."""
    ended = text if prompt or not end or text.endswith(end) else text + end
    return Passage(place=place, text=ended, special=True, goes_on=prompt)


def _check_choice(place: str, kind: str, choices: Choices, accepted: Sequence[TrainOn]) -> TrainOn:
    """Returns the tokens to train on; the first of ``accepted`` stands for ``AUTO``.

    Raises:
        ConfigError: the choice does not fit the kind of record.
    """
    if choices.train_on is TrainOn.AUTO:
        return accepted[0]
    if choices.train_on not in accepted:
        values = " or ".join(choice.value for choice in (TrainOn.AUTO, *accepted))
        raise ConfigError(
            f"{place}: data.train_on = {choices.train_on.value!r}: the record is {kind}, which"
            f" takes {values}"
        )
    return choices.train_on


def _ready(request: IdsRequest, choices: Choices) -> Sample:
    """Returns the sample of ready ids; its own labels win over ``train_on``."""
    ids = list(request.ids)
    labels = request.chosen_labels(all_count=choices.train_on is TrainOn.ALL)
    if labels is not None:
        return Sample(place=request.place, ids=ids, counted=_runs(labels))
    _check_choice(request.place, "a list of ids without labels", choices, (TrainOn.ALL,))
    return Sample(place=request.place, ids=ids, counted=((0, len(ids)),))


def _runs(labels: Sequence[int]) -> tuple[Span, ...]:
    """Returns the spans of labels that count."""
    groups = itertools.groupby(range(len(labels)), key=lambda n: labels[n] != IGNORED_LABEL)
    runs = [list(numbers) for counts, numbers in groups if counts]
    return tuple((run[0], run[-1] + 1) for run in runs)


def _completion(request: CompletionRequest, choices: Choices) -> Draft:
    """Returns the draft of a prompt and its completion as texts."""
    accepted = (TrainOn.COMPLETION, TrainOn.ALL)
    kind = _check_choice(request.place, "a text with a completion", choices, accepted)
    text = request.prompt + _plain(request.place, request.completion, choices.end).text
    prompt = _plain(request.place, request.prompt, None, prompt=True)
    return Draft(
        passage=Passage(place=request.place, text=text, special=True),
        prompt=prompt if kind is TrainOn.COMPLETION else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """A conversation with its template and the tokens to train on."""

    request: ChatRequest
    template: Template
    conversation: Conversation
    train_on: TrainOn
    turns: Turns
    special_tokens: Sequence[str]

    @classmethod
    def of(
        cls, request: ChatRequest, encoder: Encoder, template: Template | None, choices: Choices
    ) -> _Chat:
        """Returns the conversation of a request.

        Raises:
            ConfigError: there is no template, or the choices do not fit.
        """
        if template is None:
            raise ConfigError(
                f"{request.place}: is a conversation, and there is no chat template; set"
                " data.chat_template"
            )
        accepted: tuple[TrainOn, ...] = (TrainOn.ASSISTANT, TrainOn.ALL, TrainOn.LAST)
        kind = "a conversation"
        if request.prompt_turns is not None:
            accepted = (TrainOn.COMPLETION, *accepted)
            kind = "a conversation with a completion"
        template = template.of_tools(request.tools)
        request = dataclasses.replace(request, turns=template.forms.fitted(request.turns))
        return cls(
            request=request,
            template=template,
            conversation=Conversation(
                place=request.place,
                turns=request.turns,
                tools=request.tools,
                variables=request.variables,
                special_tokens=() if choices.special_in_text else encoder.special_tokens,
            ),
            train_on=_check_choice(request.place, kind, choices, accepted),
            turns=choices.turns,
            special_tokens=encoder.special_tokens,
        )

    def drafts(self) -> Iterator[Draft]:
        """Yields the conversation's samples before their encoding.

        Raises:
            ConfigError: the tokens of the turns that count are unknown.
        """
        if self.train_on in (TrainOn.ALL, TrainOn.COMPLETION):
            yield self._whole()
            return
        if not self._assistants():
            raise ConfigError(
                f"{self.request.place}: has no turn of the role {ASSISTANT}, so no token would"
                " count; remove the record, map its roles, or set data.train_on: all"
            )
        counted = self._counted()
        if not counted:
            return
        if self._takes_marks():
            yield self._marked(counted)
        else:
            yield from self._turns(counted)

    def prompt(self) -> Passage:
        """Returns the passage of all turns with the header of the assistant's next turn.

        Raises:
            ConfigError: the template refuses the conversation, or the last turn is the assistant's.
        """
        number = len(self.request.turns)
        if self.request.turns[-1].role == ASSISTANT:
            raise self._refusal(number - 1, "is the last, so nothing is to be answered; remove it")
        whole = self.train_on in (TrainOn.ALL, TrainOn.COMPLETION)
        training = not whole and self._takes_marks()
        return self._passage(self._prompt(number, training=training))

    def _assistants(self) -> list[int]:
        """Returns the numbers of the assistant's turns."""
        turns = enumerate(self.request.turns)
        return [number for number, turn in turns if turn.role == ASSISTANT]

    def _counted(self) -> list[int]:
        """Returns the numbers of the turns that count; a message's own mark wins."""
        assistants = self._assistants()
        chosen = set(assistants[-1:] if self.train_on is TrainOn.LAST else assistants)
        for number, turn in enumerate(self.request.turns):
            if turn.counts is not None:
                (chosen.add if turn.counts else chosen.discard)(number)
        return sorted(chosen)

    def _takes_marks(self) -> bool:
        """Returns whether the template's marks decide the tokens that count.

        The last turn alone is a sample of its own, since no later turn could change its rendering.

        Raises:
            ConfigError: ``turns: all`` needs marks, and the template has none.
        """
        marked = self.template.training is not None
        if self.turns is Turns.AUTO:
            return marked and self.train_on is not TrainOn.LAST
        if self.turns is Turns.ALL and not marked:
            raise ConfigError(
                f"{self.request.place}: data.turns = 'all': data.chat_template ="
                f" {self.template.name!r} has no {{% generation %}} around the assistant's turns,"
                " and Penstock has no training variant of its text; set data.turns: each"
            )
        return self.turns is Turns.ALL

    def _whole(self) -> Draft:
        """Returns the draft of a conversation of which all tokens count, or all behind the prompt.
        A message's own mark wins.
        """
        rendering = self.conversation.render(self.template)
        turns, first = self.request.turns, self.request.prompt_turns or 0
        prompt = None
        open_answer = False
        if self.train_on is TrainOn.COMPLETION:
            prompt = self._passage(self._front(first, rendering))
            open_answer = not self.template.endings.is_closed(training=False)
        else:
            questions = [number for number, turn in enumerate(turns) if turn.role == USER]
            first = max(questions, default=0)  # a template cuts thoughts before the last question
        spans: tuple[Span, ...] | None = None
        if any(turn.counts is not None for turn in turns):
            spans = self._parts_that_count(rendering)
        remarks = self._presence().check(
            rendering.text, range(len(turns)), set(range(first, len(turns)))
        )
        return Draft(
            passage=self._passage(rendering),
            spans=spans,
            prompt=prompt,
            remarks=(*remarks, Remark.OPEN) if open_answer else remarks,
        )

    def _parts_that_count(self, rendering: Rendering) -> tuple[Span, ...]:
        """Returns the spans of a rendering without turns that have a mark of 0.

        Raises:
            ConfigError: a turn's part of the rendering is unknown, or a turn of the prompt counts.
        """
        spans = []
        start = 0
        for number, turn in enumerate(self.request.turns):
            if turn.counts and number < (self.request.prompt_turns or 0):
                raise self._refusal(number, "is a part of the prompt; remove its train or weight")
            if turn.counts is False:
                first, last = self._part(number, rendering, training=False)
                spans.append((start, first))
                start = last
        spans.append((start, len(rendering.text)))
        return tuple((first, last) for first, last in spans if first < last)

    def _marked(self, counted: Sequence[int]) -> Draft:
        """Returns the draft of all turns, of which the template's marks in ``counted`` turns count.

        Raises:
            ConfigError: the marks cannot be matched to turns.
        """
        rendering = self.conversation.render(self.template, training=True)
        assistants = self._assistants()
        marks = rendering.marks
        if not any(first < last for first, last in marks):
            raise ConfigError(
                f"{self.request.place}: data.chat_template = {self.template.name!r} marks no text"
                " of the conversation as the assistant's; set data.turns: each"
            )
        spans = marks
        if list(counted) != assistants:
            if len(marks) != len(assistants):
                raise ConfigError(
                    f"{self.request.place}: the template marks {len(marks)} parts of"
                    f" {len(assistants)} turns of the assistant, so single turns cannot be chosen;"
                    f" {self._remedy_of_marks(counted)}"
                )
            by_turn = dict(zip(assistants, marks, strict=True))
            spans = [
                by_turn[n] if n in by_turn else self._part(n, rendering, training=True)
                for n in counted
            ]
        prompt = None
        if self.request.prompt_turns is not None and self.train_on is TrainOn.ASSISTANT:
            prompt = self._passage(self._prompt(self.request.prompt_turns, training=True))
        numbers = range(len(self.request.turns))
        remarks = self._presence(training=True).check(rendering.text, numbers, set(counted))
        if not self.template.endings.is_closed(training=True):
            remarks = (*remarks, Remark.OPEN)
        return Draft(
            passage=self._passage(rendering),
            spans=tuple(sorted(spans)),
            prompt=prompt,
            remarks=remarks,
        )

    def _remedy_of_marks(self, counted: Sequence[int]) -> str:
        """Returns a way to choose single turns, which works for turns of the assistant alone."""
        if all(self.request.turns[number].role == ASSISTANT for number in counted):
            return "set data.turns: each"
        return "remove train and weight from the messages"

    def _turns(self, counted: Sequence[int]) -> Iterator[Draft]:
        """Yields the drafts of single turns of the assistant. A first turn that no prompt precedes
        does not count.

        Raises:
            ConfigError: see :meth:`_turn`; or the first turn alone would count.
        """
        first = self.request.turns[0]
        remarks: tuple[Remark, ...] = ()
        if counted[0] == 0 and first.role == ASSISTANT:
            if first.counts or len(counted) == 1:
                remedy = "its train or weight" if first.counts else "the record"
                raise self._refusal(0, f"is the first turn, so nothing prompts it; remove {remedy}")
            counted, remarks = counted[1:], (Remark.FIRST,)
        for number in counted:
            draft = self._turn(number, is_last=number == counted[-1])
            yield dataclasses.replace(draft, remarks=(*remarks, *draft.remarks))
            remarks = ()

    def _turn(self, number: int, *, is_last: bool) -> Draft:
        """Returns the draft of one turn of the assistant, behind the turns before it.

        Raises:
            ConfigError: the turn is not the assistant's, its prompt is no prefix, or the template
                leaves a text out.
        """
        if self.request.turns[number].role != ASSISTANT:
            raise self._refusal(
                number,
                "only the assistant's turns are samples of their own; remove its train or weight",
            )
        rendering = self.conversation.render(self.template, number + 1)
        prompt = self._front(number, rendering)
        searched = range(number + 1) if is_last else range(number, number + 1)
        remarks = self._presence().check(rendering.text, searched, {number})
        if not self.template.endings.is_closed(training=False):
            mark = self.template.endings.mark_behind(
                self.request.turns, number, self.special_tokens
            )
            rendering = dataclasses.replace(rendering, text=rendering.text + mark)
            remarks = remarks if mark else (*remarks, Remark.OPEN)
        return Draft(
            passage=self._passage(rendering), prompt=self._passage(prompt), remarks=remarks
        )

    def _front(self, number: int, rendering: Rendering) -> Rendering:
        """Returns the rendering of the turns before one of the assistant's, with its header.

        Raises:
            ConfigError: the ``rendering`` with the turn does not begin with it.
        """
        prompt = self._prompt(number)
        if not rendering.text.startswith(prompt.text):
            place = first_difference(prompt.text, rendering.text)
            raise self._refusal(
                number,
                f"data.chat_template = {self.template.name!r} renders the turns before it in"
                f" another way once it follows: {shown(prompt.text[place:])} becomes"
                f" {shown(rendering.text[place:])} at character {place:,}. Remove the turn, or name"
                " a template that marks the assistant's turns by {% generation %}",
            )
        return prompt

    def _presence(self, *, training: bool = False) -> Presence:
        """Returns the search for texts in renderings of the conversation."""
        return Presence(conversation=self.conversation, template=self.template, training=training)

    def _prompt(self, number: int, *, training: bool = False) -> Rendering:
        """Returns the rendering of the turns before one of the assistant's, with its header.

        Raises:
            ConfigError: there is no turn before it.
        """
        if not number:
            raise self._refusal(0, "is the first turn, so nothing prompts it; remove the record")
        return self.conversation.render(self.template, number, prompts=True, training=training)

    def _part(self, number: int, whole: Rendering, *, training: bool) -> Span:
        """Returns the span of a turn with its header: the rendering cut after it without the one
        cut before it.

        Raises:
            ConfigError: one of both is no prefix of the ``whole`` rendering.
        """
        ends = [0]
        for stop in (number, number + 1):
            if stop:
                cut = self.conversation.render(self.template, stop, training=training)
                if not whole.text.startswith(cut.text):
                    raise self._refusal(
                        number,
                        "the template renders earlier turns in another way once later ones follow,"
                        " so the turn's own mark has no place; remove the mark",
                    )
                ends.append(len(cut.text))
        return ends[-2], ends[-1]

    def _passage(self, rendering: Rendering) -> Passage:
        """Returns the passage of a rendering."""
        return Passage(place=self.request.place, text=rendering.text, literal=rendering.literal)

    def _refusal(self, number: int, cause: str) -> ConfigError:
        """Returns the error for a turn, counted from 0."""
        role = self.request.turns[number].role
        return ConfigError(f"{self.request.place}: turn {number} (role {role}): {cause}")
