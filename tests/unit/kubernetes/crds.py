"""Schemas of the custom resources that the chart makes, written from the types of their projects.

They hold the fields that a user may set, and refuse all others.

Sources:
    LeaderWorkerSet: https://github.com/kubernetes-sigs/lws/blob/024af0845195be26fb4a0847c37d7209849d69da/api/leaderworkerset/v1/leaderworkerset_types.go
    PodMonitor: https://github.com/prometheus-operator/prometheus-operator/blob/053d84e6f46eee63a93324b8b9fc14e749bbab69/pkg/apis/monitoring/v1/podmonitor_types.go
    ScaledObject: https://github.com/kedacore/keda/blob/01ee1d30b296b6cd0347641d5084962f4081b6e0/apis/keda/v1alpha1/scaledobject_types.go
    its triggers: https://github.com/kedacore/keda/blob/1a230280bc32fcb19f9fa19b77e25eb6c2a5d537/apis/keda/v1alpha1/scaletriggers_types.go
    the Prometheus trigger: https://keda.sh/docs/scalers/prometheus
"""

from __future__ import annotations

from typing import Any

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_SWITCH: _Schema = {"type": "boolean"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_ANY_OBJECT: _Schema = {"type": "object"}  # of a core type, which is validated by itself
_COUNT_OR_SHARE: _Schema = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
_NAMES: _Schema = {"type": "array", "items": _TEXT}
_TEXTS: _Schema = {"type": "object", "additionalProperties": _TEXT}


def _one_of(*values: str) -> _Schema:
    return {"enum": list(values)}


def _object(*required: str, **properties: _Schema) -> _Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def _resource(api: str, kind: str, spec: _Schema) -> _Schema:
    metadata = _object("name", name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS)
    return _object(
        *("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_REQUIREMENT = _object(
    "key",
    "operator",
    key=_TEXT,
    operator=_one_of("In", "NotIn", "Exists", "DoesNotExist"),
    values=_NAMES,
)
_SELECTOR = _object(
    matchLabels=_TEXTS,
    matchExpressions={"type": "array", "items": _REQUIREMENT},
)

_LEADER_WORKER_TEMPLATE = _object(
    "workerTemplate",
    leaderTemplate=_ANY_OBJECT,
    workerTemplate=_ANY_OBJECT,
    size={"type": "integer", "minimum": 1},
    restartPolicy=_one_of(
        "Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"
    ),
    subGroupPolicy=_object(
        subGroupPolicyType=_one_of("LeaderWorker", "LeaderExcluded"), subGroupSize=_COUNT
    ),
    volumeClaimTemplates={"type": "array", "items": _ANY_OBJECT},
    persistentVolumeClaimRetentionPolicy=_ANY_OBJECT,
)
_LEADER_WORKER_SET = _object(
    "leaderWorkerTemplate",
    replicas=_COUNT,
    leaderWorkerTemplate=_LEADER_WORKER_TEMPLATE,
    rolloutStrategy=_object(
        "type",
        type=_one_of("RollingUpdate"),
        rollingUpdateConfiguration=_object(
            partition=_COUNT, maxUnavailable=_COUNT_OR_SHARE, maxSurge=_COUNT_OR_SHARE
        ),
    ),
    startupPolicy=_one_of("LeaderCreated", "LeaderReady"),
    networkConfig=_object("subdomainPolicy", subdomainPolicy=_one_of("Shared", "UniquePerReplica")),
)

_METRICS_ENDPOINT = _object(
    port=_TEXT,
    targetPort={"type": ["integer", "string"]},
    path=_TEXT,
    scheme=_one_of("http", "https"),
    params=_ANY_OBJECT,
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    scrapeTimeout=_TEXT,
    tlsConfig=_object(
        ca=_ANY_OBJECT,
        cert=_ANY_OBJECT,
        keySecret=_ANY_OBJECT,
        serverName=_TEXT,
        insecureSkipVerify=_SWITCH,
    ),
    bearerTokenSecret=_ANY_OBJECT,
    honorLabels=_SWITCH,
    honorTimestamps=_SWITCH,
    trackTimestampsStaleness=_SWITCH,
    basicAuth=_ANY_OBJECT,
    oauth2=_ANY_OBJECT,
    authorization=_ANY_OBJECT,
    metricRelabelings={"type": "array"},
    relabelings={"type": "array"},
    proxyUrl=_TEXT,
    followRedirects=_SWITCH,
    enableHttp2=_SWITCH,
    filterRunning=_SWITCH,
)
_POD_MONITOR = _object(
    "selector",
    "podMetricsEndpoints",
    jobLabel=_TEXT,
    podTargetLabels=_NAMES,
    podMetricsEndpoints={"type": "array", "items": _METRICS_ENDPOINT},
    selector=_SELECTOR,
    namespaceSelector=_object(any=_SWITCH, matchNames=_NAMES),
    sampleLimit=_COUNT,
    targetLimit=_COUNT,
    scrapeProtocols=_NAMES,
    labelLimit=_COUNT,
    labelNameLengthLimit=_COUNT,
    labelValueLengthLimit=_COUNT,
    keepDroppedTargets=_COUNT,
    attachMetadata=_object(node=_SWITCH),
    scrapeClass=_TEXT,
)

_PROMETHEUS = _object(
    *("serverAddress", "query", "threshold"),
    serverAddress=_TEXT,
    query=_TEXT,
    threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
    activationThreshold=_TEXT,
    namespace=_TEXT,
    customHeaders=_TEXT,
    ignoreNullValues=_TEXT,
    queryParameters=_TEXT,
    unsafeSsl=_TEXT,
    timeout=_TEXT,
)
_TRIGGER = _object(
    *("type", "metadata"),
    type={"const": "prometheus"},
    name=_TEXT,
    useCachedMetrics=_SWITCH,
    metadata=_PROMETHEUS,
    authenticationRef=_object("name", name=_TEXT, kind=_TEXT),
    metricType=_one_of("AverageValue", "Value", "Utilization"),
)
_RULES = _object(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy=_one_of("Max", "Min", "Disabled"),
    policies={
        "type": "array",
        "items": _object(
            *("type", "value", "periodSeconds"),
            type=_one_of("Pods", "Percent"),
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        ),
    },
)
_SCALED_OBJECT = _object(
    *("scaleTargetRef", "triggers"),
    scaleTargetRef=_object(
        "name", name=_TEXT, apiVersion=_TEXT, kind=_TEXT, envSourceContainerName=_TEXT
    ),
    pollingInterval=_COUNT,
    initialCooldownPeriod=_COUNT,
    cooldownPeriod=_COUNT,
    idleReplicaCount=_COUNT,
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(
            name=_TEXT, behavior=_object(scaleUp=_RULES, scaleDown=_RULES)
        ),
        restoreToOriginalReplicaCount=_SWITCH,
        scalingModifiers=_object(
            formula=_TEXT, target=_TEXT, activationTarget=_TEXT, metricType=_TEXT
        ),
    ),
    triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
    fallback=_object(
        *("failureThreshold", "replicas"),
        failureThreshold=_COUNT,
        replicas=_COUNT,
        behavior=_one_of(
            "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
        ),
    ),
)

SCHEMAS: dict[str, _Schema] = {
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _LEADER_WORKER_SET
    ),
    "PodMonitor": _resource("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
    "ScaledObject": _resource("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
}
