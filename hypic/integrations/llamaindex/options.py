"""The settings of ``HypicLLM``, and what one call may change: which engine, which policy, how tokens are chosen.

Making a model, copying it or asking for its ``metadata`` loads nothing; the engine starts with the first call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from llama_index.core.base.llms.types import LLMMetadata, MessageRole
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.function_calling import FunctionCallingLLM
from pydantic import Field, PrivateAttr, SecretStr, model_validator

from hypic import checkpoints
from hypic.errors import ConfigError, meant
from hypic.integrations._common import (
    KnownTexts,
    Lease,
    count_tokens_with,
    max_context_of,
    model_name_of,
    registry_of,
    tokenize_with,
    way_out,
)
from hypic.integrations._options import check_call, check_waiting
from hypic.integrations.llamaindex.calls import Call
from hypic.integrations.llamaindex.tools import Wanted, check_template, opens_reasoning
from hypic.registry import Registry
from hypic.types import Policy, SamplingParams, TextEngine

POLICY = tuple(f.name for f in fields(Policy))
SAMPLING = tuple(f.name for f in fields(SamplingParams))
SETTINGS = "engine settings such as device go in settings={...}."
_SHARED_OPTIONS = ("policy", "namespace", "split_flat", "chat_template_kwargs")
CALL_OPTIONS = (*SAMPLING, *_SHARED_OPTIONS, "hypic", "tools", "tool_choice")


class EngineOptions(FunctionCallingLLM):
    """Which engine, which policy, how tokens are chosen."""

    model: str | None = Field(
        default=None, description="Checkpoint folder or name; without it, or as hypic-tiny, the bundled model."
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="Engine settings such as device or memory.")
    engine: Any = Field(
        default=None,
        exclude=True,
        repr=False,
        description="An engine to use as it is; otherwise one per model and settings is shared in this process.",
    )
    base_url: str | None = Field(default=None, description="A running `hypic serve` in the place of an engine here.")
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False, description="The server's, if it asks.")
    timeout: float = Field(default=60.0, description="Seconds that a server may be silent.")
    max_retries: int = Field(default=2, description="How often a server that is full or away is asked again.")
    policy: Policy | None = Field(default=None, description="What may be reused; None leaves it to the engine.")
    namespace: str | None = Field(default=None, description="Segments and known texts are not shared across these.")
    split_flat: bool = Field(default=True, description="Find known segment texts again in flat text.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="E.g. {'enable_thinking': False}.")
    context_window: int | None = Field(default=None, description="Overrides what the model says.")
    is_function_calling_model: bool = Field(
        default=True, description="Whether agents and structured output use the chat template's tools."
    )

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

    _leases: dict[str, Lease] = PrivateAttr(default_factory=dict)
    _remotes: dict[str, TextEngine] = PrivateAttr(default_factory=dict)
    _has_told: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_options(cls, values: Any) -> Any:
        unknown = [name for name in values if name not in cls.model_fields] if isinstance(values, dict) else []
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
        self._sampling({})
        return self

    @property
    def model_name(self) -> str:
        """The model as reports name it: the engine's own name once there is one."""
        name = self.model or (checkpoints.BUNDLED if self.base_url is None else "hypic")
        started = self._started()
        return name if started is None else model_name_of(started, name)

    @property
    def metadata(self) -> LLMMetadata:
        """The context is the engine's once it has started, before that what the checkpoint's folder says."""
        return LLMMetadata(
            context_window=self._context_window(),
            num_output=self.max_tokens or SamplingParams().max_tokens,
            is_chat_model=True,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model_name,
            system_role=MessageRole.SYSTEM,
        )

    @property
    def registry(self) -> Registry | None:
        """The engine's known segment texts; starts the engine."""
        return registry_of(self.get_engine())

    def get_engine(self) -> TextEngine:
        """The engine, started on first use.

        Raises:
            ConfigError, UnsupportedModel, CheckpointError: the model cannot be loaded.
        """
        started = self._started()
        if started is not None:
            return started
        if self.base_url is not None:
            return self._remotes.setdefault(self._spec(), self._remote(self.base_url))
        return self._leases.setdefault(self._spec(), Lease(self.model, self.settings)).engine

    def close(self) -> None:
        """Gives this model's share of the engine back; the next call takes one anew. Copies share it."""
        while self._leases:
            self._leases.popitem()[1].close()
        while self._remotes:
            remote: Any = self._remotes.popitem()[1]
            remote.close()

    def tokenizer_fn(self, text: str) -> list[int]:
        """Token ids of ``text`` by itself: ``Settings.tokenizer = llm.tokenizer_fn`` makes LlamaIndex count right."""
        return tokenize_with(self.get_engine(), text)

    def count_tokens(self, text: str) -> int:
        """Number of tokens of ``text`` by itself."""
        return count_tokens_with(self.get_engine(), text)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # An engine is a resource, not a value: copies share it.
        return super().__deepcopy__({**(memo or {}), id(self.engine): self.engine})

    def __getstate__(self) -> dict[str, Any]:
        # The base class deletes what cannot be pickled from the very object: let it have a copy.
        bare = self.model_copy(update={"engine": None, "model": self.model if self.engine is None else self.model_name})
        bare._leases, bare._remotes, bare._has_told = {}, {}, []
        return super(EngineOptions, bare).__getstate__()

    def _spec(self) -> str:
        remote = (self.base_url, hash(self.api_key), self.namespace, self.timeout, self.max_retries)
        return repr((self.model, sorted(self.settings.items()), remote if self.base_url is not None else None))

    def _remote(self, base_url: str) -> TextEngine:
        from hypic.integrations.remote import RemoteEngine

        return RemoteEngine(
            base_url,
            api_key=None if self.api_key is None else self.api_key.get_secret_value(),
            model=self.model,
            namespace=self.namespace,
            timeout_s=self.timeout,
            max_retries=self.max_retries,
        )

    def _started(self) -> TextEngine | None:
        if self.engine is not None:
            given: TextEngine = self.engine
            return given
        lease = self._leases.get(self._spec())
        return self._remotes.get(self._spec()) if lease is None else lease.engine

    def _context_window(self) -> int:
        started = self._started()
        told = self.context_window or (None if started is None else max_context_of(started))
        folder = None if self.base_url is not None else _folder_context(self.model)
        return told or self.settings.get("max_context") or folder or DEFAULT_CONTEXT_WINDOW

    def _call(self, options: Mapping[str, Any], *, template: bool = True) -> Call:
        """One call with its keywords; ``template``: whether the prompt goes through the chat template.

        Raises:
            ConfigError: a keyword is unknown or cannot be right, or tools would not reach the model.
        """
        unknown = [name for name in options if name not in CALL_OPTIONS]
        if unknown:
            name, known = unknown[0], f"known are {', '.join(CALL_OPTIONS)}."
            near = "" if name in POLICY else meant(name, CALL_OPTIONS)
            raise ConfigError(f"unknown call option {name!r}{near}; {way_out(name, options[name], known)}")
        check_call(options)
        engine = self.get_engine()
        wanted = Wanted.of(options.get("tools"), options.get("tool_choice"))
        given = {**(self.chat_template_kwargs or {}), **(options.get("chat_template_kwargs") or {})} or None
        if wanted.tools and not template:
            raise ConfigError("tools need the chat template; ask with formatted=False.")
        check_template(engine, wanted.tools, given)
        in_reasoning = template and opens_reasoning(engine, given)
        name, sampling = model_name_of(engine, self.model), self._sampling(options)
        return Call(engine, name, sampling, self._policy(options), given, wanted, in_reasoning)

    def _known_texts(self, engine: TextEngine, options: Mapping[str, Any]) -> KnownTexts:
        policy = self._policy(options) or self._engine_policy()
        split = options.get("split_flat", self.split_flat) and policy.reuse == "segments"
        return KnownTexts(registry_of(engine), options.get("namespace", self.namespace), split)

    def _policy(self, options: Mapping[str, Any]) -> Policy | None:
        """The policy of one call; ``hypic={"reuse": "none"}`` changes fields of it."""
        policy: Policy | None = options.get("policy") or self.policy
        changes = options.get("hypic") or {}
        unknown = [name for name in changes if name not in POLICY]
        if unknown:
            near = meant(unknown[0], POLICY)
            raise ConfigError(f"unknown policy field {unknown[0]!r}{near}; known are {', '.join(POLICY)}.")
        return (policy or self._engine_policy()).with_(**changes) if changes else policy

    def _engine_policy(self) -> Policy:
        """What the engine settings say."""
        policy: Policy = self.settings.get("policy", Policy())
        return policy.with_(**{name: self.settings[name] for name in POLICY if name in self.settings})

    def _sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        values = {name: options.get(name, getattr(self, name)) for name in SAMPLING}
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})


@lru_cache(maxsize=64)
def _folder_context(model: str | None) -> int | None:
    """The context length that a checkpoint's folder names, if ``model`` is one."""
    folder = checkpoints.bundled() if model is None or checkpoints.is_bundled(model) else Path(model).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    value = {**config, **(config.get("text_config") or {})}.get("max_position_embeddings")
    return value if isinstance(value, int) else None
