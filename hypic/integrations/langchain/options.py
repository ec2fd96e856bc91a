"""The settings that ``ChatHypic`` and ``HypicLLM`` have in common, and what one call may change.

Every call option is a field: a call with keywords is a call on a copy with those fields changed, so
that LangChain's cache keys, which are made from fields, always see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any, Self

from langchain_core.exceptions import ModelInvalidRequestError, ModelNotFoundError
from pydantic import BaseModel, Field, SecretStr, model_validator

from hypic.errors import meant
from hypic.integrations._common import (
    KnownTexts,
    Lease,
    answering_of,
    count_tokens_with,
    model_name_of,
    registry_of,
    tokenize_with,
    way_out,
)
from hypic.integrations._options import check_call, check_waiting
from hypic.integrations.langchain.engine import Call, Served, langchain_errors
from hypic.types import Policy, SamplingParams, TextEngine

POLICY = tuple(f.name for f in fields(Policy))
SAMPLING = tuple(f.name for f in fields(SamplingParams))
CALL_OPTIONS = (*SAMPLING, "model", "policy", "namespace", "split_flat", "chat_template_kwargs", "timeout")
_TOOL_OPTIONS = ("tools", "tool_choice", "functions", "function_call", "response_format", "parallel_tool_calls")
PLAIN_TEXT = {"type": "text"}  # the response format that all answers have
# Hints of other providers and of LangChain itself that change nothing here.
_IGNORED = ("stream", "cache_control", "prompt_cache_key", "prompt_cache_options", "ls_structured_output_format")
SETTINGS = "engine settings such as device go in settings={...}."
NO_TOOLS = (
    "HypicLLM takes no tools and no response_format, and never drops them silently; use ChatHypic, or put the "
    "instructions into the prompt and parse the text."
)


class EngineOptions(BaseModel):
    """Which engine, which policy, how tokens are chosen. Making one loads nothing."""

    model: str | None = None
    """Checkpoint folder or name; ``None`` or ``hypic-tiny`` is the bundled one. ``model_name`` is taken too."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Engine settings such as ``device`` or ``memory``, passed on to ``hypic.LLM``."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An engine to use as it is; otherwise one per model and settings is shared in this process."""
    base_url: str | None = None
    """A running ``hypic serve`` in the place of an engine here; ``model`` is then what it calls its model."""
    policy: Policy | None = None
    """What may be reused; ``None`` leaves it to the engine."""
    namespace: str | None = None
    """Cached segments and known texts are not shared across namespaces."""
    split_flat: bool = True
    """Find known segment texts again in flat text (only where the policy reuses segments)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template, e.g. ``{"enable_thinking": False}``."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    logprobs: int | None = None
    ignore_eos: bool | None = None

    streaming: bool = False
    """Call token callbacks during ``invoke`` too."""
    timeout: float | None = None
    """Seconds for a whole call."""
    max_retries: int | None = None
    """How often a server that is full or away is asked again; an engine in this process has nothing to retry."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """The server's, if it asks for one; an engine in this process does not."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_options(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if "model_name" in values and "model_name" not in cls.model_fields:
            values = {"model": values["model_name"], **{k: v for k, v in values.items() if k != "model_name"}}
        known = set(cls.model_fields) | {f.alias for f in cls.model_fields.values()}
        unknown = [name for name in values if name not in known]
        if unknown:
            near = "" if unknown[0] in POLICY else meant(unknown[0], cls.model_fields)
            raise ValueError(
                f"unknown option {unknown[0]!r}{near}; {way_out(unknown[0], values[unknown[0]], SETTINGS)}"
            )
        return values

    @model_validator(mode="after")
    def _check_hypic_options(self) -> Self:
        if self.engine is not None and not isinstance(self.engine, TextEngine):
            raise ValueError(f"engine is a {type(self.engine).__name__}; it needs the methods stream and astream.")
        if self.base_url is not None and (self.engine is not None or self.settings):
            raise ValueError("base_url names a server, which has an engine and settings of its own; leave yours out.")
        check_waiting(self.timeout, self.max_retries)
        self._sampling(None)
        # Made now: made on first use, two threads could each make one, and copies would not share it.
        _ = self._leases
        return self

    # Not a private attribute: those would displace the base class's own initialisation.
    @cached_property
    def _leases(self) -> dict[str, Lease | Served]:
        return {}

    @property
    def model_name(self) -> str:
        """The model as reports name it: the engine's own name where an engine was given."""
        return self.model or "hypic" if self.engine is None else model_name_of(self.engine, self.model)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that an answer depends on beside the prompt: the key of LangChain's caches."""
        policy = None if self.policy is None else asdict(self.policy)
        named: dict[str, Any] = {"model_name": self.model_name, "policy": policy}
        if self.engine is not None:
            named["engine"] = answering_of(self.engine)
        names = (*SAMPLING, "settings", "base_url", "namespace", "split_flat", "chat_template_kwargs")
        return {**{name: getattr(self, name) for name in names}, **named}

    def get_engine(self) -> TextEngine:
        """The engine, started on first use; with ``base_url`` the server's, to which nothing is sent yet.

        Raises:
            ModelNotFoundError: the model cannot be loaded.
            ModelInvalidRequestError: ``base_url`` is no HTTP address.
        """
        if self.engine is not None:
            given: TextEngine = self.engine
            return given
        server = (self.base_url, hash(self.api_key), self.max_retries)
        key = repr((self.model, sorted(self.settings.items()), server))
        with langchain_errors():
            lease = self._leases.get(key) or self._leases.setdefault(key, self._taken())
        return lease.engine

    def _taken(self) -> Lease | Served:
        if self.base_url is None:
            return Lease(self.model, self.settings)
        key = None if self.api_key is None else self.api_key.get_secret_value()
        return Served(self.base_url, key, self.model, self.max_retries)

    def close(self) -> None:
        """Gives this model's share of the engine back; the next call takes one anew. Copies share it."""
        while self._leases:
            self._leases.popitem()[1].close()

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` by itself, as segments are encoded."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return list(custom(text))
        with langchain_errors():
            return tokenize_with(self.get_engine(), text)

    def get_num_tokens(self, text: str) -> int:
        """Number of tokens of ``text`` by itself."""
        custom = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return len(custom(text))
        with langchain_errors():
            return count_tokens_with(self.get_engine(), text)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # An engine is a resource, not a value: copies share it.
        return super().__deepcopy__({**(memo or {}), id(self.engine): self.engine})

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "_leases": {}}}

    def _bound(self, options: Mapping[str, Any]) -> Self:
        """A copy with a call's keywords as its fields; ``self`` when there are none.

        Raises:
            NotImplementedError: tools or a response format are asked for.
            ModelInvalidRequestError: a keyword is unknown, or its value of the wrong kind.
        """
        with langchain_errors():
            check_call(options)
        if any(options.get(name) and options[name] != PLAIN_TEXT for name in _TOOL_OPTIONS):
            raise NotImplementedError(NO_TOOLS)
        flat = {k: v for k, v in options.items() if k not in (*_TOOL_OPTIONS, *_IGNORED, "hypic")}
        hints = dict(options.get("hypic") or {})
        changes = {name: hints.pop(name) for name in list(hints) if name in POLICY}
        update = {**flat, **hints}
        unknown = [name for name in update if name not in CALL_OPTIONS]
        if unknown:
            name, known = unknown[0], f"known are {', '.join(CALL_OPTIONS)}."
            near = "" if name in POLICY else meant(name, POLICY if name in hints else CALL_OPTIONS)
            raise ModelInvalidRequestError(f"unknown call option {name!r}{near}; {way_out(name, update[name], known)}")
        self._refuse_other_model(update.get("model"))
        if changes:
            with langchain_errors():
                update["policy"] = (update.get("policy") or self._policy()).with_(**changes)
        return self.model_copy(update=update) if update else self

    def _refuse_other_model(self, model: str | None) -> None:
        if self.engine is not None and model not in (None, self.model, self.model_name):
            raise ModelNotFoundError(
                f"model is {model!r} but the given engine serves {self.model_name!r}; leave out engine= or model=."
            )

    def _call(self, stop: list[str] | None) -> Call:
        engine = self.get_engine()
        with langchain_errors():
            sampling = self._sampling(stop)
            name = model_name_of(engine, self.model)
        return Call(engine, name, sampling, self.policy, self.chat_template_kwargs, self.timeout)

    def _known_texts(self, engine: TextEngine) -> KnownTexts:
        split = self.split_flat and self._policy().reuse == "segments"
        return KnownTexts(registry_of(engine), self.namespace, split)

    def _policy(self) -> Policy:
        """The policy in force: the model's own, else what its engine settings say."""
        if self.policy is not None:
            return self.policy
        policy: Policy = self.settings.get("policy", Policy())
        return policy.with_(**{name: self.settings[name] for name in POLICY if name in self.settings})

    def _sampling(self, stop: list[str] | None) -> SamplingParams:
        values = {name: getattr(self, name) for name in SAMPLING}
        values["stop"] = self.stop if stop is None else stop
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})
