"""``hypic app``: documents, questions and what was reused for each answer, in a web page.

One engine and one set of documents for all tabs, in the memory of the process: when it ends, they are gone. This is a
demonstration for one machine, not a service: it knows no users. ``create_app`` in ``rag.app`` makes the application.
"""
