"""A running ``hypic serve`` in place of an engine in this process, over HTTP."""

from hypic.integrations.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
