"""Who a request is from: what callers say of themselves, or where they come from."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("headers", "caller"),
    [
        ({"X-Client-Id": "studio-7"}, "id studio-7"),
        ({"X-Client-Id": "studio-7", "X-Forwarded-For": "10.0.0.9"}, "id studio-7"),
        ({"X-Forwarded-For": "10.0.0.9, 10.0.0.1"}, "address 10.0.0.9"),
        ({}, "address testclient"),
        # Neither an error nor a caller: the address is there in any case.
        ({"X-Client-Id": ""}, "address testclient"),
        ({"X-Client-Id": "a" * 129}, "address testclient"),
        ({"X-Client-Id": "caf\xe9"}, "address testclient"),
        ({"X-Forwarded-For": " , 10.0.0.1"}, "address testclient"),
    ],
)
def test_a_job_says_who_asks(client, service, body_of, headers, caller):
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    assert client.post("/decode", content=body_of(), headers=encoded).status_code == 200
    assert service.jobs[-1].caller == caller
