"""Values of the chart that the tests render, by name."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

_GROUP: Values = {"kind": "LeaderWorkerSet", "nodes": 2, "gpus": 8}
_TOLERATION: Values = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
_SPREAD: Values = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "router"}},
}
_SIDECAR: Values = {
    "name": "routing",
    "image": "registry.example/sidecar:1.0",
    "args": ["--port=8000"],
    "ports": [{"name": "sidecar", "containerPort": 8000}],
    "readinessProbe": {"tcpSocket": {"port": "sidecar"}},
    "resources": {"requests": {"cpu": "1"}},
}
_PLACEMENT: Values = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [_TOLERATION],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "serving",
    "podAnnotations": {"example.com/team": "chat"},
}
# Options of every shape: numbers, lists, tables in tables, names that TOML must quote.
_OPTIONS: Values = {
    "policy": "ppd",
    "corrections": ["load", "noise"],
    "weights": {"ttft": 1, "tpot": 0.5},
    "session_capacity": 2000000,
    "responses_max_bytes": 536870912,
    "trace_share": 0.001,
    "resume_streams": 1,
    "decode_fallback": True,
    "log_level": "warning",
    "otlp_endpoint": 'http://traces:4318/v1/traces?a="b"&c=<d>',
    "embedding": ["http://embedder:30000"],
    "admission": {"max_in_flight": 512, "kv_headroom": False},
    "rate": {"requests_per_minute": 600},
    "tenants": {
        "blue": {"targets": {"ttft_ms": 300, "tpot_ms": 40}, "keys": ["0" * 64]},
        "green.example": {"rate": {"tokens_per_minute": 1000000}, "keys": []},
    },
    "retrieval": {
        "url": "http://pool:8100",
        "defaults": {
            "Qwen/Qwen3-8B": {
                "collection": "docs",
                "filter": {"any": [{"field": "language", "is": "en"}, {"field": "n", "is": 3}]},
            }
        },
    },
    "answer_cache": {"url": "http://pool:8100", "threshold": 0.9},
    "shared": {"url": "rediss://valkey:6379/0", "username": "router", "responses": True},
}


def _scaled(kind: str) -> Values:
    return {
        "router": {"autoscaling": {"kind": kind}},
        "prefill": {"autoscaling": {"kind": kind, "target": 8192}},
        "decode": {"autoscaling": {"kind": kind, "maxReplicas": 8}},
    }


MATRIX: dict[str, Values] = {
    "defaults": {},
    "groups": {"prefill": _GROUP, "decode": _GROUP},
    "one group": {"prefill": {**_GROUP, "nodes": 1}, "decode": {"replicas": 3, "gpus": 4}},
    "gateway": {"router": {"config": {"gateway": {"port": 9002, "decode_port": 8000}}}},
    "gateway with sidecars": {
        "router": {"config": {"gateway": {"port": 9002, "decode_port": 8000}}},
        "networkPolicy": {"gateways": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]},
        "decode": {**_GROUP, "sidecars": [_SIDECAR]},
    },
    "pool": {"pool": {"enabled": True, "config": {"threads": 4, "step": {"slots": 16}}}},
    "a default collection of the pool": {
        "pool": {"enabled": True},
        "router": {
            "config": {"retrieval": {"defaults": {"Qwen/Qwen3-8B": {"collection": "docs"}}}}
        },
    },
    "hpa": _scaled("HPA"),
    "keda": _scaled("KEDA"),
    "scaled groups": {
        "prefill": {**_GROUP, "autoscaling": {"kind": "HPA"}},
        "decode": {**_GROUP, "autoscaling": {"kind": "KEDA"}},
    },
    "monitors": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "pool": {"enabled": True},
        "replica": {"enabled": True},
        "router": {"tlsSecret": "router-tls"},
    },
    "rdma": {
        "rdma": {"enabled": True, "count": 8, "devices": "mlx5_0,mlx5_1", "networks": "rdma-net"},
        "prefill": _GROUP,
        "decode": _GROUP,
        "replica": {"enabled": True},
    },
    "host network": {"rdma": {"enabled": True, "hostNetwork": True}},
    "no network policy": {"networkPolicy": {"enabled": False}},
    "clients named": {
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
            "operators": [],
        },
        "decode": {"kvEvents": {"enabled": True}},
    },
    "existing secret": {"secrets": {"existingSecret": "keys", "protectWorkers": True}},
    "a file of the store": {
        "router": {
            "config": {"shared": {"url": "rediss://valkey:6379/0", "ca_file": "/etc/store/ca.pem"}},
            "extraVolumes": [{"name": "store", "secret": {"secretName": "store-ca"}}],
            "extraVolumeMounts": [{"name": "store", "mountPath": "/etc/store"}],
        }
    },
    "secrets": {
        "secrets": {
            "adminToken": "s3cret",
            "workerApiKey": "w0rker",
            "sharedPassword": "st0re",
            "sharedResponsesKey": "5a" * 32,
            "protectWorkers": True,
            "tenantKeys": {"blue": ["sk-blue"], "red": ["sk-red", "sk-red-2"]},
        },
        "router": {"config": {"tenants": {"blue": {"keys": ["0" * 64]}}}},
    },
    "replicas only": {
        "prefill": {"enabled": False},
        "decode": {"enabled": False},
        "replica": {"enabled": True, "replicas": 4},
        "router": {"config": {"policy": "replica"}},
    },
    "hybrid": {"replica": {"enabled": True, **_GROUP}},
    "router alone": {
        "prefill": {"enabled": False},
        "decode": {"enabled": False},
        "router": {
            "discovery": {
                "namespace": "engines",
                "prefill": "app=sglang,role=prefill",
                "decode": "app=sglang,role=decode",
                "port": 30000,
            }
        },
        "serviceAccount": {"create": False, "name": "mine"},
    },
    "options": {
        "router": {
            "config": _OPTIONS,
            "table": {"configMap": "table"},
            "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
        }
    },
    "existing configuration": {"router": {"existingConfigSecret": "router-file"}},
    "plugin": {
        "decode": {
            "plugin": {"tpotTargetMs": 40, "maxAppendTokens": 32768, "unroomed": True},
            "args": ["--mem-fraction-static", "0.85"],
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        },
        "prefill": {"plugin": {"enabled": False}},
    },
    "placement": {
        "nameOverride": "ppd",
        "fullnameOverride": "front",
        "listenAddress": "::",
        "images": {
            "router": {"repository": "r/router", "digest": f"sha256:{'0' * 64}"},
            "worker": {"repository": "r/worker", "tag": "1.2"},
        },
        "imagePullSecrets": [{"name": "registry"}],
        "model": {
            "path": "/models/qwen",
            "servedName": "qwen",
            "existingClaim": "weights",
            "tokenSecret": {"name": "hub"},
        },
        "router": {**_PLACEMENT, "topologySpreadConstraints": [_SPREAD]},
        "decode": {
            **_PLACEMENT,
            "topologySpreadConstraints": [_SPREAD],
            "runtimeClassName": "nvidia",
            "resources": {"limits": {"memory": "256Gi"}},
            "extraVolumes": [{"name": "cache", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "cache", "mountPath": "/root/.cache"}],
        },
        "pool": {**_PLACEMENT, "enabled": True, "storage": {"storageClass": "fast"}},
    },
}

# Makes a document of every template.
EVERYTHING: Values = {
    "secrets": {"adminToken": "s3cret", "workerApiKey": "w0rker", "protectWorkers": True},
    "pool": {"enabled": True},
    "podMonitor": {"enabled": True},
    "router": {"autoscaling": {"kind": "HPA"}},
    "prefill": {**_GROUP, "autoscaling": {"kind": "KEDA"}},
    "replica": {"enabled": True},
}

# Values that the schema refuses, and the value that its message must name.
REFUSED: dict[str, Values] = {
    "/": {"routr": {}},
    "/router/replicas": {"router": {"replicas": 0}},
    "/router/config": {"router": {"config": {"polcy": "ppd"}}},
    "/router/config/policy": {"router": {"config": {"policy": "best"}}},
    "/router/config/trace_share": {"router": {"config": {"trace_share": 2}}},
    "/router/config/admission": {"router": {"config": {"admission": {"max_inflight": 1}}}},
    "/router/config/tenants/a": {"router": {"config": {"tenants": {"a": {"weigth": {}}}}}},
    "/router/service/type": {"router": {"service": {"type": "Ingress"}}},
    "/router/service/port": {"router": {"service": {"port": 70000}}},
    "/router/autoscaling/kind": {"router": {"autoscaling": {"kind": "VPA"}}},
    "/router/autoscaling/cpuUtilization": {"router": {"autoscaling": {"cpuUtilization": 0}}},
    "/prefill/kind": {"prefill": {"kind": "StatefulSet"}},
    "/prefill/nodes": {"prefill": {"nodes": 2}},
    "/decode/gpus": {"decode": {"gpus": 0}},
    "/decode/plugin": {"decode": {"plugin": {"tpotTargetMs": 40, "appendChunk": 512}}},
    "/decode/plugin/tpotTargetMs": {"decode": {"plugin": {"tpotTargetMs": 0}}},
    "/decode/env/0": {"decode": {"env": [{"name": "A", "val": "b"}]}},
    "/decode/sidecars/0": {"decode": {"sidecars": [{"name": "routing"}]}},
    "/networkPolicy/gateways": {"networkPolicy": {"gateways": "any"}},
    "/decode/shmSize": {"decode": {"shmSize": "much"}},
    "/images/worker/digest": {"images": {"worker": {"digest": "sha256:abc"}}},
    "/model/path": {"model": {"path": ""}},
    "/rdma/devices": {"rdma": {"devices": "mlx5_0, mlx5_1"}},
    "/rdma/resource": {"rdma": {"resource": "hca"}},
    "/secrets/adminToken": {"secrets": {"adminToken": "two words"}},
    "/secrets/tenantKeys/blue": {"secrets": {"tenantKeys": {"blue": []}}},
    "/pool/config": {"pool": {"config": {"data": "/elsewhere"}}},
    "/podMonitor/interval": {"podMonitor": {"interval": "often"}},
    "/listenAddress": {"listenAddress": "localhost"},
}
