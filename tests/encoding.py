"""Token ids of one document."""

from __future__ import annotations

from penstock.models.data.reading.records import Document
from penstock.models.data.tokenizer import Tokenizer


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text without marks."""
    document = Document(place="a text", parts=[text])
    return [token for part in tokenizer.encode_documents([document]) for token in part.ids.tolist()]
