"""What form an answer must have, as clients say it and in the engine's own words: OpenAI's field, and vLLM's."""

from typing import Any, Literal

import msgspec

from tercet.engine.http_errors import ApiError
from tercet.ipc.messages import Structured


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The schema is always held to, so `strict` changes nothing."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What form a chat's answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def to_engine(self) -> Structured | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                400,
                f"response_format has type {self.type} and {'no' if self.json_schema is None else 'a'} json_schema; "
                "want type json_schema with one, or another type without",
                param="response_format",
            )
        if self.json_schema is not None:
            return Structured(json_schema=self.json_schema.schema)
        return Structured(json_object=True) if self.type == "json_object" else None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for both endpoints, and more forms: one of these."""

    json: dict[str, Any] | str | None = None
    """A JSON schema."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def to_engine(self) -> Structured:
        names = self.__struct_fields__
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ApiError(
                400,
                f"structured_outputs has {' and '.join(given) or 'nothing'}; want one of {', '.join(names)}",
                param="structured_outputs",
                code="invalid_request",
            )
        return Structured(
            json_schema=self.json,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
        )
