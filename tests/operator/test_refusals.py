"""Why the API server refuses objects, in its own words."""

from __future__ import annotations

import pytest

from skyproxy_operator.refusals import refusal_cause


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, 'pods "dev-0" is forbidden: exceeded quota: gpus', "QuotaExceeded"),
        (
            403,
            'pods "dev-0" is forbidden: violates PodSecurity "restricted:latest": privileged',
            "PodSecurityViolation",
        ),
        (403, 'pods is forbidden: User "x" cannot create resource', "Forbidden"),
        (422, "spec.containers[0].image: Required value", "Invalid"),
        (500, "etcd is gone", "ApiError"),
    ],
)
def test_refusals_of_the_api_server_are_told(status: int, message: str, reason: str) -> None:
    cause = refusal_cause("Pod dev-0", status, message)
    assert cause.reason == reason
    assert message in cause.message
    assert "Pod dev-0" in cause.message


FORBIDDEN = 'pods "dev-0" is forbidden: '


@pytest.mark.parametrize(
    ("message", "reason", "text"),
    [
        (
            "exceeded quota: gpus, requested: nvidia.com/gpu=2, used: nvidia.com/gpu=3, limited: nvidia.com/gpu=4",
            "QuotaExceeded",
            "the ResourceQuota gpus of its namespace: nvidia.com/gpu: 2 asked for, 3 of 4 in use.",
        ),
        (
            "exceeded quota: all, requested: cpu=2,pods=1, used: cpu=1,pods=5, limited: cpu=2,pods=5",
            "QuotaExceeded",
            "cpu: 2 asked for, 1 of 2 in use; pods: 1 asked for, 5 of 5 in use.",
        ),
        (
            "failed quota: all: must specify limits.cpu for: worker; limits.memory for: worker",
            "QuotaNeedsResources",
            "the ResourceQuota all of its namespace counts limits.cpu for: worker; limits.memory for: worker. Set",
        ),
        (
            "maximum memory usage per Container is 64Mi, but limit is 1Gi",
            "LimitRangeViolated",
            "a LimitRange of its namespace: maximum memory usage per Container is 64Mi, but limit is 1Gi.",
        ),
        (
            "[minimum cpu usage per Pod is 1, but request is 100m, maximum cpu usage per Pod is 2, but limit is 4]",
            "LimitRangeViolated",
            "minimum cpu usage per Pod is 1, but request is 100m, maximum cpu usage per Pod is 2, but limit is 4.",
        ),
        (
            "memory max limit to request ratio per Container is 2, but provided ratio is 4.000000",
            "LimitRangeViolated",
            "memory max limit to request ratio per Container is 2, but provided ratio is 4.000000.",
        ),
    ],
)
def test_a_quota_or_limit_is_named_with_what_is_asked_for_and_what_there_is(
    message: str, reason: str, text: str
) -> None:
    cause = refusal_cause("Pod dev-0", 403, FORBIDDEN + message)
    assert (cause.reason, cause.actionable) == (reason, True)
    assert text in cause.message
    assert FORBIDDEN not in cause.message
