# SPDX-License-Identifier: Apache-2.0
"""Parameters: ``@NAME@`` in a block's code becomes the ``repr`` of a value."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from .errors import ManifestError, ParameterError

_PLACEHOLDER = re.compile(r"@([A-Za-z_]\w*)@")


def fill(code: str, values: Mapping[str, Any]) -> str:
    """Put ``repr`` of the values where the code says ``@NAME@``."""

    def value(match: re.Match) -> str:
        if match[1] not in values:
            raise ManifestError(f"{match[0]} is not among the [parameters]")
        return repr(values[match[1]])

    return _PLACEHOLDER.sub(value, code)


def resolve_parameters(
    declared: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Values by patch name: what each has ``declared``, with ``given`` over it.

    Raises ParameterError for a name no patch declares, or a value that is not a plain
    Python literal.
    """
    given = dict(given or {})
    known = {name for defaults in declared.values() for name in defaults}
    for name, value in given.items():
        if name not in known:
            raise ParameterError(
                f"parameter {name!r} is not known to these patches; "
                f"known are {sorted(known) or 'none'}"
            )
        try:
            literal = ast.literal_eval(repr(value)) == value
        except (SyntaxError, ValueError):
            literal = False
        if not literal:
            raise ParameterError(f"parameter {name}: {value!r} is not a plain literal")
    return {
        patch: {name: given.get(name, default) for name, default in defaults.items()}
        for patch, defaults in declared.items()
    }
