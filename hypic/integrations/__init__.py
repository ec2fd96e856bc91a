"""One file per framework: translate to ``Prompt``, translate back."""
