"""What the page shows as one sentence: a document, a name or a question that cannot be used."""

from __future__ import annotations


class RagError(ValueError):
    """What was given cannot be used; the message says why and what to do. ``status`` is HTTP's."""

    status = 400


class TooLarge(RagError):
    """A document, or all of them together, are over a limit."""

    status = 413


class NotThere(RagError):
    """A document or a conversation that is not there, or no longer."""

    status = 404
