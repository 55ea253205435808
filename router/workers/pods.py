"""The parts of a Kubernetes pod that discovery reads, as the cluster's API sends them."""

from __future__ import annotations

import msgspec


class _Api(msgspec.Struct, frozen=True, rename="camel"):
    """An object of the cluster's API; unknown fields are ignored."""


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
    """One pod."""

    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def ready(self) -> bool:
        """Whether the pod has an address, is ready and is not being deleted."""
        conditions = self.status.conditions or ()
        is_ready = any(
            condition.type == "Ready" and condition.status == "True" for condition in conditions
        )
        return is_ready and self.metadata.deletion_timestamp is None and self.status.pod_ip != ""

    def url(self, port: int | str) -> str | None:
        """The base URL of a port of the pod.

        Args:
            port: its number, or the name that the pod gives it.

        Returns:
            None if the pod has no port of that name.
        """
        if isinstance(port, str):
            containers = self.spec.containers or ()
            ports = [item for container in containers for item in container.ports or ()]
            numbers = [item.container_port for item in ports if item.name == port]
            if not numbers:
                return None
            port = numbers[0]
        host = f"[{self.status.pod_ip}]" if ":" in self.status.pod_ip else self.status.pod_ip
        return f"http://{host}:{port}"


class PodList(_Api, frozen=True):
    """The answer to a list request."""

    metadata: _Meta
    items: tuple[Pod, ...] | None = None


class Event(_Api, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Failure(_Api, frozen=True):
    """The API server's error object."""

    code: int = 0
    message: str = ""
