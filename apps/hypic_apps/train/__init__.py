"""How the bundled model is made: data from packages, generated questions, tokenizer, training loop, export.

Needs a checkout with the ``dev`` tools; the library never imports it. ``README.md`` in this folder says how to run it.
"""
