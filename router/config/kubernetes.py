"""Options of finding workers among a Kubernetes cluster's pods."""

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
