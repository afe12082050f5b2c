"""Errors name the client's own field."""

import pytest

from headrace_core.errors import RequestError
from headrace_server.http.routing import respell
from headrace_server.requests.constraints import spelling_of


@pytest.mark.parametrize(
    "field", ["regex", "tools", "output_config.format", "text.format", "structured_outputs"]
)
def test_the_field_that_leaves_no_token_is_the_client_s(field):
    form = "the constraint on the form (structured_outputs, response_format or tools)"
    error = RequestError(f"no token is possible with {form} and min_tokens")
    respell(error, spelling_of(field))
    assert str(error) == (
        f"no token is possible with the constraint on the form ({field}) and min_tokens"
    )
