"""Options of worker discovery among the pods of a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ppd.contract import Role

from .ranges import PortName, RemotePort, range_problems


class Kubernetes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pods are workers.

    Attributes:
        namespace: namespace of the pods.
        prefill: label selector of prefill workers, as ``kubectl get pods -l`` takes it.
        decode: label selector of decode workers.
        replica: label selector of workers that do both.
        port: the port that workers listen on, or its name in the pod's specification.
        kubeconfig: path of a file. "" is the service account of the router's pod; outside a
            cluster, kubectl's file.
    """

    namespace: str
    prefill: str = ""
    decode: str = ""
    replica: str = ""
    port: RemotePort | PortName = 30000
    kubeconfig: str = ""

    def selector(self, role: Role) -> str:
        """Return the label selector of a role's pods; "" if there is none."""
        of_role: str = getattr(self, role)
        return of_role

    def problems(self, roles: Collection[Role]) -> list[str]:
        """Return a message for each option that is wrong.

        Args:
            roles: of the workers that the policy uses.
        """
        wrong = [f"policy uses no {r} pods" for r in Role if r not in roles and self.selector(r)]
        if not any(self.selector(role) for role in roles):
            wrong.append(f"a label selector is needed: {' or '.join(roles)}")
        if not self.namespace:
            wrong.append("namespace must be named")
        wrong += range_problems(self)
        return [f"kubernetes: {problem}" for problem in wrong]
