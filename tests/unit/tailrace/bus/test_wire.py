"""Errors in headers and delivery data in acknowledgement subjects."""

from __future__ import annotations

import pytest

from tailrace.bus import CallFailedError
from tailrace.bus.calls import error_headers, error_in
from tailrace.bus.durable import DeliveryInfo
from tailrace_protos.generation import CallErrorCode


@pytest.mark.parametrize("code", list(CallErrorCode))
@pytest.mark.parametrize("retry_after_s", [0.0, 0.25])
def test_an_error_survives_the_wire(code: CallErrorCode, retry_after_s: float) -> None:
    error = error_in(error_headers(CallFailedError(code, "because", retry_after_s)), "s")
    assert error is not None
    assert (error.code, error.reason, error.retry_after_s) == (code, "because", retry_after_s)


@pytest.mark.parametrize("reason", ["x" * 3_000_000, "a lone \ud800", "two\r\nlines"])
def test_a_reason_of_any_text_fits_into_a_header(reason: str) -> None:
    headers = error_headers(CallFailedError(CallErrorCode.INVALID, reason))
    value = headers["Nats-Service-Error"]
    assert len(value.encode()) <= 8000
    assert "\n" not in value
    assert value[:3] == reason[:3]


@pytest.mark.parametrize(
    ("headers", "code", "retry_after_s"),
    [
        ({"Nats-Service-Error-Code": "400"}, CallErrorCode.INVALID, 0.0),
        ({"Nats-Service-Error-Code": "503", "Retry-After": "2"}, CallErrorCode.OVERLOADED, 2.0),
        (
            {"Nats-Service-Error-Code": "503", "Retry-After": "Fri, 1 Jan"},
            CallErrorCode.OVERLOADED,
            0.0,
        ),
        ({"Nats-Service-Error-Code": "503", "Retry-After": "inf"}, CallErrorCode.OVERLOADED, 0.0),
        ({"Nats-Service-Error-Code": "418"}, CallErrorCode.INTERNAL, 0.0),
        ({"Nats-Service-Error-Code": "500", "Tailrace-Error": "new"}, CallErrorCode.INTERNAL, 0.0),
    ],
)
def test_errors_of_foreign_workers_are_understood(
    headers: dict[str, str], code: CallErrorCode, retry_after_s: float
) -> None:
    error = error_in(headers, "s")
    assert error is not None
    assert (error.code, error.retry_after_s) == (code, retry_after_s)


def test_a_reply_without_error_headers_is_no_error() -> None:
    assert error_in(None, "s") is None
    assert error_in({"traceparent": "x"}, "s") is None


@pytest.mark.parametrize(
    "subject",
    [
        "$JS.ACK.r_EPISODES.train.3.41.99.1700000000000000000.7",
        "$JS.ACK._.hash.r_EPISODES.train.3.41.99.1700000000000000000.7.rnd",
    ],
)
def test_both_forms_of_acknowledgement_subjects_are_read(subject: str) -> None:
    assert DeliveryInfo.of(subject) == DeliveryInfo("r_EPISODES", 3, 41, 1700000000000000000)
