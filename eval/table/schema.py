"""``ppd-eval table schema``: the JSON schema of the table format, for readers in other languages.

``tables/read_table.c`` is such a reader.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ppd.table_file import VERSION, TableRecord


def schema() -> dict[str, Any]:
    """Return the JSON schema of a table file of this version."""
    (reference,), definitions = msgspec.json.schema_components(
        [TableRecord], ref_template="#/$defs/{name}"
    )
    record = definitions.pop(reference["$ref"].rpartition("/")[2])
    record["properties"]["version"] = {"const": VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **record,
        "$defs": definitions,
    }


def run() -> int:
    """Print the schema.

    Returns:
        The exit status.
    """
    print(json.dumps(schema(), indent=1))
    return 0
