"""Chat templates turn by turn, without encoding a second time what the policy has read or said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Message = dict[str, Any]
MARK = "\u2060drivetrain\u2060"
"""Stands for a response where a template is looked at."""


class ChatTokenizer(Protocol):
    """What is used of a tokenizer; those of transformers have it."""

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any:
        """Render, with ``tokenize`` and ``add_generation_prompt``."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""


class Chat:
    """Ids of a conversation, of which the policy's own turns are given as the ids that it drew.

    A template is rendered as text only for what is new: the end of the policy's turn, the messages after it, and the
    beginning of its next turn. So no id of an earlier turn can change, and there is one beginning of sequence.

    Args:
        tokenizer: with a chat template.
        options: further arguments of ``apply_chat_template``, such as ``tools``.

    Raises:
        ValueError: the template does not show an assistant's message as it is.
    """

    def __init__(self, tokenizer: ChatTokenizer, **options: Any) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._opened: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        self._after_mark(self._rendered(self._opened))

    def _rendered(self, messages: list[Message], *, answer: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer, **self._options
        )
        return text

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The first prompt's ids: the messages, and the beginning of the policy's turn."""
        # The template has the beginning of sequence in it, if there is one.
        return tuple(self._tokenizer.encode(self._rendered([*messages], answer=True), add_special_tokens=False))

    def follow(self, response_token_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids between a response of the policy and its next one: the end of its turn as far as it is missing, the
        messages, and the beginning of its next turn.
        """
        text = self._after_mark(self._rendered([*self._opened, *messages], answer=True))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if response_token_ids and ids and response_token_ids[-1] == ids[0]:
            ids = ids[1:]  # the policy has ended its turn itself
        return tuple(ids)

    def _after_mark(self, rendered: str) -> str:
        if rendered.count(MARK) != 1:
            raise ValueError("the chat template does not show an assistant's message once and as it is")
        return rendered[rendered.index(MARK) + len(MARK) :]
