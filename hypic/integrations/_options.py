"""What a call through a framework, or a model made there, is given: looked at before an engine sees any of it.

Fields are checked by pydantic where a model is made; keywords of one call are not, and copies of a model are not
validated anew. Knows no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from hypic.arguments import check_template_inputs
from hypic.errors import ConfigError
from hypic.types import Policy


def check_call(options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a keyword has a value of the wrong kind.
    """
    policy, fields = options.get("policy"), options.get("hypic")
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy is {policy!r:.60}; pass hypic.Policy(...).")
    if fields is not None and not isinstance(fields, Mapping):
        raise ConfigError(f"hypic is {fields!r:.60}; pass a mapping with fields of the policy, such as {{'seam': 16}}.")
    namespace, tools = options.get("namespace"), options.get("tools")
    if namespace is not None and not isinstance(namespace, str):
        raise ConfigError(f"namespace is {namespace!r:.60}; pass text, or leave it out.")
    if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str | bytes)):
        raise ConfigError(f"tools is {tools!r:.60}; pass a list of tools.")
    check_template_inputs(None, options.get("chat_template_kwargs"))
    check_waiting(options.get("timeout"), None)


def check_waiting(timeout_s: object, max_retries: object) -> None:
    """How long a call may take, or a server be silent, and how often it is asked again.

    Raises:
        ConfigError: one of them is neither ``None`` nor such a number.
    """
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool) and float(timeout_s) >= 0
    if timeout_s is not None and not is_number:
        raise ConfigError(f"timeout is {timeout_s!r:.60}; pass seconds, 0 or more.")
    is_count = isinstance(max_retries, Integral) and not isinstance(max_retries, bool) and int(max_retries) >= 0
    if max_retries is not None and not is_count:
        raise ConfigError(f"max_retries is {max_retries!r:.60}; pass a whole number, 0 or more.")
