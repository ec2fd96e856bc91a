"""The segment store: what is cached, for how long. One file per tier; ``device`` is the only one so far."""
