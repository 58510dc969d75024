"""What Kubernetes and its operators take, offline: objects held against the schemas of tests/fixtures/crds.

As an API server does with fieldValidation=Strict: defaults are filled in before `required` is checked, a field that the
schema does not know is refused, int-or-string and nullable are what they are. CEL rules and webhooks are not in it.
"""

from __future__ import annotations

import copy
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FIXTURE = Path(__file__).parent / "fixtures/crds/schemas.json.xz"
RELEASES = [f"1.{minor}" for minor in range(25, 38)]
_CORE = {
    "Job": "io.k8s.api.batch.v1.Job",
    "Service": "io.k8s.api.core.v1.Service",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Pod": "io.k8s.api.core.v1.Pod",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
}
_VERSIONS = {"Job": "batch/v1", "NetworkPolicy": "networking.k8s.io/v1"}
_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def errors(one: dict[str, Any], release: str = "1.37", trainer: str = "2.3") -> list[str]:
    """What is wrong with an object, as path: message."""
    kind = one.get("kind", "")
    if kind in _CORE:
        if one.get("apiVersion") != _VERSIONS.get(kind, "v1"):
            return [f"apiVersion: {one.get('apiVersion')} has no {kind}"]
        return _messages(_core(kind, release), one)
    key = f"{kind} {trainer}" if kind in ("TrainJob", "TrainingRuntime") else kind
    about = _schemas()["custom"].get(key)
    if about is None or one.get("apiVersion") != f"{about['group']}/{about['version']}":
        return [f"apiVersion: {one.get('apiVersion')} has no {kind}"]
    filled = _filled(about["schema"], copy.deepcopy(one))
    meta = filled.pop("metadata", {})
    return [*_messages(_custom(key), filled), *(f"metadata/{text}" for text in _messages(_core_part(_META), meta))]


@cache
def _schemas() -> dict[str, Any]:
    return json.loads(lzma.decompress(FIXTURE.read_bytes()))


@cache
def _core(kind: str, release: str) -> Draft202012Validator:
    return _core_part(_CORE[kind], release)


@cache
def _core_part(name: str, release: str = "1.37") -> Draft202012Validator:
    found = _schemas()
    definitions = {key: _closed(found["definitions"][index]) for key, index in found["core"][release].items()}
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": definitions})


@cache
def _custom(key: str) -> Draft202012Validator:
    schema = copy.deepcopy(_schemas()["custom"][key]["schema"])
    schema["properties"].pop("metadata")
    return Draft202012Validator(_closed(schema))


def _messages(validator: Draft202012Validator, one: Any) -> list[str]:
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(one)]


def _closed(schema: Any) -> Any:
    """The schema as JSON Schema has it, with unknown fields refused."""
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "nullable"}
    for key in ("items", "additionalProperties", "not"):
        if key in found:
            found[key] = _closed(found[key])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in found:
            found[key] = [_closed(entry) for entry in found[key]]
    if "properties" in found:
        found["properties"] = {key: _closed(entry) for key, entry in found["properties"].items()}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("anyOf", None)
        found["type"] = ["integer", "string"]
        if "pattern" not in found:
            return found
    is_object = "object" in ([found.get("type")] if isinstance(found.get("type"), str) else found.get("type", []))
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if schema.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found


def _filled(schema: Any, value: Any) -> Any:
    """The value with the schema's defaults."""
    if isinstance(value, list) and "items" in schema:
        return [_filled(schema["items"], entry) for entry in value]
    if not isinstance(value, dict):
        return value
    for key, entry in schema.get("properties", {}).items():
        if key not in value and "default" in entry:
            value[key] = copy.deepcopy(entry["default"])
        if key in value:
            value[key] = _filled(entry, value[key])
    rest = schema.get("additionalProperties")
    if isinstance(rest, dict):
        for key in value.keys() - schema.get("properties", {}).keys():
            value[key] = _filled(rest, value[key])
    return value
