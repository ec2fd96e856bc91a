"""What the retriever raises on purpose.

    RetrieverError
    |-- DocumentError          a file or text that cannot be indexed
    |-- IndexFormatError       a saved index that is missing, foreign, of another version or damaged
    `-- EmbedderError          an embedding model that is missing, damaged or gives unusable vectors

All are ``ValueError``; every message is one sentence that names the value and the way out. The
tree is the retriever's own, because the package stands alone.
"""

from __future__ import annotations


class RetrieverError(ValueError):
    """A wrong argument, and root of what the retriever raises."""


class DocumentError(RetrieverError):
    """A document is not readable text."""


class IndexFormatError(RetrieverError):
    """A folder does not hold an index that can be loaded."""


class EmbedderError(RetrieverError):
    """An embedding model is not there, not the expected one, or gives unusable vectors."""
