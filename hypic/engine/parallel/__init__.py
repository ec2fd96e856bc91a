"""Segment parallelism: which worker encodes which cold segment, and how what it made travels. Size 1 is a no-op.

Here stand the parts that know no engine: what work costs (``cost``), who does it (``assign``), the same played at fleet
scale (``simulate``), what is said (``messages``, ``wire``), how entries are carried (``transport``, ``group``,
``device_memory``), and how processes are kept alive (``processes``, ``supervisor``, ``ray_actors``).
``hypic.engine.peers`` and ``hypic.engine.workers`` bind them to an engine.
"""
