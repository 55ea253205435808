"""Which pods are workers: what the options say, and what a cluster's API tells of each."""

from __future__ import annotations

import msgspec


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
