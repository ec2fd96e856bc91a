"""Answers as objects: a tool that the model must call, or JSON text, and the parser behind it.

Asked for in the prompt, checked afterwards; decoding is not constrained (see ``tools``).
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

StructuredMethod = Literal["function_calling", "json_schema", "json_mode"]
Schema = dict[str, Any] | type


def structured(
    model: BaseChatModel, schema: Schema, method: StructuredMethod, include_raw: bool, *, strict: bool = False
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """The model and the parser of its answers; with ``include_raw`` message, object and error instead of an exception.

    Raises:
        ValueError: ``method`` is unknown.
    """
    if method not in get_args(StructuredMethod):
        raise ValueError(f"method is {method!r}; choose one of {', '.join(get_args(StructuredMethod))}.")
    asked = _asked(model, schema, method, include_raw)
    # Refused by the call, before anything runs: LangChain's tests want the object to be made.
    asked = asked.bind(strict=True) if strict else asked
    parser = _parser(schema, method)
    if not include_raw:
        return asked | parser
    parsed: Runnable[Any, Any] = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed: Runnable[Any, Any] = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=asked) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _asked(
    model: BaseChatModel, schema: Schema, method: StructuredMethod, include_raw: bool
) -> Runnable[LanguageModelInput, AIMessage]:
    traced = {"kwargs": {"method": method}, "schema": schema}
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        unchecked = {"unchecked": True} if include_raw else {}
        return model.bind_tools([schema], tool_choice=name, ls_structured_output_format=traced, **unchecked)
    answer_schema = convert_to_json_schema(schema) if method == "json_schema" else {}
    return model.bind(answer_schema=answer_schema, ls_structured_output_format=traced)


def _parser(schema: Schema, method: StructuredMethod) -> BaseOutputParser[Any]:
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        if is_model:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)  # type: ignore[list-item]
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return PydanticOutputParser(pydantic_object=schema) if is_model else JsonOutputParser()  # type: ignore[arg-type]
