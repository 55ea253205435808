"""Which pods are workers: what the options say, and what a cluster's API tells of each."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ppd.contract import Role


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pods are workers.

    Attributes:
        prefill, decode, replica: label selectors, as ``kubectl get pods -l`` takes them.
        port: that the workers listen on, or its name in the pod's specification.
        kubeconfig: a file; "": the service account of the router's pod, elsewhere kubectl's file.
    """

    namespace: str
    prefill: str = ""
    decode: str = ""
    replica: str = ""
    port: int | str = 30000
    kubeconfig: str = ""

    def selector(self, role: Role) -> str:
        of_role: str = getattr(self, role)
        return of_role

    def problems(self, roles: Collection[Role]) -> list[str]:
        wrong = [f"policy uses no {r} pods" for r in Role if r not in roles and self.selector(r)]
        if not any(self.selector(role) for role in roles):
            wrong.append(f"a label selector is needed: {' or '.join(roles)}")
        if not self.namespace:
            wrong.append("namespace must be named")
        if not self.port or (isinstance(self.port, int) and not 0 < self.port <= 65535):
            wrong.append(f"port must be 1..65535 or a port's name, got {self.port!r}")
        return [f"kubernetes: {problem}" for problem in wrong]


class _Api(msgspec.Struct, frozen=True, rename="camel"):
    """As in the cluster's API, which may always say more."""


class _Meta(_Api, frozen=True):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Port(_Api, frozen=True):
    container_port: int
    name: str | None = None


class _Container(_Api, frozen=True):
    ports: tuple[_Port, ...] | None = None


class _Spec(_Api, frozen=True):
    containers: tuple[_Container, ...] | None = None


class _Condition(_Api, frozen=True):
    type: str
    status: str


class _Status(_Api, frozen=True):
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[_Condition, ...] | None = None


class Pod(_Api, frozen=True):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def ready(self) -> bool:
        """It serves, and is not about to end."""
        conditions = self.status.conditions or ()
        says_so = any(one.type == "Ready" and one.status == "True" for one in conditions)
        return says_so and self.metadata.deletion_timestamp is None and self.status.pod_ip != ""

    def url(self, port: int | str) -> str | None:
        """None if it has no port of that name."""
        if isinstance(port, str):
            ports = [one for c in self.spec.containers or () for one in c.ports or ()]
            named = [one.container_port for one in ports if one.name == port]
            if not named:
                return None
            port = named[0]
        host = f"[{self.status.pod_ip}]" if ":" in self.status.pod_ip else self.status.pod_ip
        return f"http://{host}:{port}"


class PodList(_Api, frozen=True):
    metadata: _Meta
    items: tuple[Pod, ...] | None = None


class Event(_Api, frozen=True):
    type: str
    object: msgspec.Raw


class Failure(_Api, frozen=True):
    code: int = 0
    message: str = ""
