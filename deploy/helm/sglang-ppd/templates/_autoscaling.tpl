{{/* The object that is scaled. Arguments: root, component. */}}
{{- define "ppd.scaled" -}}
{{- $groups := eq ((index .root.Values .component).kind | default "Deployment") "LeaderWorkerSet" -}}
apiVersion: {{ $groups | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" }}
kind: {{ $groups | ternary "LeaderWorkerSet" "Deployment" }}
name: {{ include "ppd.fullname" .root }}-{{ .component }}
{{- end -}}

{{/*
The number of pods. What scales them changes it, and a manifest without the field would set it to 1: so an upgrade keeps
what the cluster has. Arguments: root, component.
*/}}
{{- define "ppd.replicas" -}}
{{- $values := index .root.Values .component -}}
{{- if eq $values.autoscaling.kind "none" -}}
replicas: {{ $values.replicas }}
{{- else -}}
{{- $scaled := include "ppd.scaled" . | fromYaml -}}
{{- with lookup $scaled.apiVersion $scaled.kind .root.Release.Namespace $scaled.name -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The router's metric of a role's load. Arguments: role. */}}
{{- define "ppd.loadMetric" -}}
{{ eq . "prefill" | ternary "ppd_worker_backlog_tokens" "ppd_worker_in_flight" }}
{{- end -}}

{{/* How fast the number of pods falls. Arguments: seconds. */}}
{{- define "ppd.scaleDown" -}}
# A decode worker that goes takes its conversations' KV with it.
scaleDown:
  stabilizationWindowSeconds: {{ . }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
