"""Programs built on hypic: command line, server, demo, measurement and training.

Nothing here is imported by the library itself.
"""
