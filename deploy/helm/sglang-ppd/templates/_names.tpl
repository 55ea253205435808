{{- define "ppd.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The room is left for the suffix of a component, and of a pod. */}}
{{- define "ppd.fullname" -}}
{{- $name := include "ppd.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select the pods of a component. Arguments: root, component. */}}
{{- define "ppd.selector" -}}
app.kubernetes.io/name: {{ include "ppd.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of a component's objects. Arguments: root, component. */}}
{{- define "ppd.labels" -}}
{{ include "ppd.selector" . }}
app.kubernetes.io/part-of: sglang-ppd
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* The label selector of a role's pods, as the router's option takes it. Arguments: root, role. */}}
{{- define "ppd.podSelector" -}}
app.kubernetes.io/name={{ include "ppd.name" .root }},app.kubernetes.io/instance={{ .root.Release.Name }},app.kubernetes.io/component={{ .role }}
{{- end -}}

{{/* An image's reference. Arguments: root, image. */}}
{{- define "ppd.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "ppd.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (printf "%s-router" (include "ppd.fullname" .)) }}
{{- else -}}
{{ required "serviceAccount.name is needed if serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "ppd.secret" -}}
{{ .Values.secrets.existingSecret | default (include "ppd.fullname" .) }}
{{- end -}}

{{/* A variable from the secret. Arguments: root, name, key, optional. */}}
{{- define "ppd.secretVariable" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef: {name: {{ include "ppd.secret" .root }}, key: {{ .key }}, optional: {{ .optional }}}
{{- end -}}

{{/* Where the pods of a component run. Arguments: the component's values. */}}
{{- define "ppd.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}
