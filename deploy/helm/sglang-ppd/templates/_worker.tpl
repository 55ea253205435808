{{/* Labels of a worker's pods, with its variant of a follower. Arguments: root, role, follower. */}}
{{- define "ppd.workerComponent" -}}
{{ .role }}{{ if .follower }}-follower{{ end }}
{{- end -}}

{{/* Not empty if a worker sends or gets KV over RDMA. Arguments: root, role. */}}
{{- define "ppd.usesRdma" -}}
{{- if and .root.Values.rdma.enabled (ne .role "replica") -}}true{{- end -}}
{{- end -}}

{{/* The flags of ppd-worker and SGLang. Arguments: root, role. */}}
{{- define "ppd.workerArgs" -}}
{{- $values := .root.Values -}}
{{- $worker := index $values .role -}}
- --role
- {{ .role }}
- --model-path
- {{ $values.model.path | quote }}
{{- with $values.model.servedName }}
- --served-model-name
- {{ . | quote }}
{{- end }}
- --host
- {{ $values.listenAddress | quote }}
- --port
- {{ $values.worker.ports.http | quote }}
- --tp-size
- {{ mul $worker.gpus $worker.nodes | quote }}
- --enable-metrics
{{- if gt (int $worker.nodes) 1 }}
- --nnodes
- $(LWS_GROUP_SIZE)
- --node-rank
- $(LWS_WORKER_INDEX)
- --dist-init-addr
- $(LWS_LEADER_ADDRESS):{{ $values.worker.ports.distInit }}
{{- end }}
{{- if eq .role "prefill" }}
- --disaggregation-bootstrap-port
- {{ $values.worker.ports.bootstrap | quote }}
{{- end }}
{{- if and (include "ppd.usesRdma" .) $values.rdma.devices }}
- --disaggregation-ib-device
- {{ $values.rdma.devices | quote }}
{{- end }}
{{- if $worker.kvEvents.enabled }}
- --kv-events-config
- {{ dict "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int $worker.kvEvents.port)) | toJson | quote }}
{{- end }}
{{- if $values.secrets.protectWorkers }}
- --api-key
- $(PPD_WORKER_API_KEY)
{{- end }}
{{- range $worker.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The variables of a worker. Arguments: root, role. */}}
{{- define "ppd.workerEnv" -}}
{{- $values := .root.Values -}}
{{- $worker := index $values .role -}}
- name: PYTHONUNBUFFERED
  value: "1"
{{- if ne .role "replica" }}
- name: PPD_ENABLE
  value: {{ $worker.plugin.enabled | ternary "1" "0" | quote }}
{{- with $worker.plugin.tpotTargetMs }}
- name: PPD_TPOT_TARGET_MS
  value: {{ . | quote }}
{{- end }}
{{- with $worker.plugin.appendChunk }}
- name: PPD_APPEND_CHUNK
  value: {{ . | int | quote }}
{{- end }}
{{- with $worker.plugin.maxAppendTokens }}
- name: PPD_MAX_APPEND_TOKENS
  value: {{ . | int | quote }}
{{- end }}
{{- if $worker.plugin.unroomed }}
- name: PPD_UNROOMED
  value: "1"
{{- end }}
{{- if not $values.rdma.enabled }}
- name: MC_FORCE_TCP
  value: "true"
- name: MOONCAKE_PROTOCOL
  value: tcp
{{- end }}
{{- end }}
{{- if $values.secrets.protectWorkers }}
{{ include "ppd.secretVariable" (dict "root" .root "name" "PPD_WORKER_API_KEY" "key" "worker-api-key" "optional" false) }}
{{- end }}
{{- with $values.model.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- with $worker.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The template of a worker's pods. Arguments: root, role, follower. */}}
{{- define "ppd.workerPod" -}}
{{- $values := .root.Values -}}
{{- $worker := index $values .role -}}
{{- $ports := $values.worker.ports -}}
{{- $labels := dict "root" .root "component" (include "ppd.workerComponent" .) -}}
{{- $rdma := include "ppd.usesRdma" . -}}
{{- $annotations := deepCopy $worker.podAnnotations -}}
{{- if and $values.secrets.protectWorkers $values.secrets.workerApiKey -}}
{{- $_ := set $annotations "checksum/worker-api-key" (sha256sum $values.secrets.workerApiKey) -}}
{{- end -}}
{{- if and $rdma $values.rdma.networks -}}
{{- $_ := set $annotations "k8s.v1.cni.cncf.io/networks" $values.rdma.networks -}}
{{- end -}}
metadata:
  # Not the chart's version: an upgrade of the chart alone restarts no worker.
  labels: {{- include "ppd.selector" $labels | nindent 4 }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # Workers do not use the cluster's API.
  automountServiceAccountToken: false
  # A Service named ppd-* would set variables that look like the plugin's own.
  enableServiceLinks: false
  # SGLang has no handler of SIGTERM while it loads weights, and the first process of a namespace needs one.
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ $worker.terminationGracePeriodSeconds }}
  securityContext: {{- toYaml $values.worker.podSecurityContext | nindent 4 }}
  {{- if and $rdma $values.rdma.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "ppd.placement" $worker | nindent 2 }}
  {{- if and $worker.sidecars (not .follower) }}
  initContainers:
    {{- range $worker.sidecars }}
    {{- $defaults := dict "securityContext" (deepCopy $values.worker.securityContext) }}
    - {{- toYaml (merge (dict "restartPolicy" "Always") . $defaults) | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: sglang
      image: {{ include "ppd.image" (dict "root" .root "image" $values.images.worker) }}
      imagePullPolicy: {{ $values.images.worker.pullPolicy }}
      command: [ppd-worker]
      args: {{- include "ppd.workerArgs" . | nindent 8 }}
      env: {{- include "ppd.workerEnv" . | nindent 8 }}
      ports:
        - {name: http, containerPort: {{ $ports.http }}}
        {{- if eq .role "prefill" }}
        - {name: bootstrap, containerPort: {{ $ports.bootstrap }}}
        {{- end }}
        {{- if gt (int $worker.nodes) 1 }}
        - {name: dist-init, containerPort: {{ $ports.distInit }}}
        {{- end }}
        {{- if $worker.kvEvents.enabled }}
        - {name: kv-events, containerPort: {{ $worker.kvEvents.port }}}
        {{- end }}
      {{- if .follower }}
      # Ranks above 0 serve /health alone. The group is made anew if one of its pods restarts.
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
      {{- else }}
      startupProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div (add $worker.startupTimeoutSeconds 9) 10 }}
      # The router lists pods that are Ready. A strict limit would move conversations of a busy worker.
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 6
      # SGLang generates a token for it, and waits up to 20 seconds.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 30
        timeoutSeconds: 25
        failureThreshold: 6
      {{- end }}
      # A pod that is being deleted leaves the router's list, and then SGLang drains on SIGTERM.
      lifecycle:
        preStop:
          sleep: {seconds: {{ $worker.preStopSleepSeconds }}}
      resources:
        {{- with $worker.resources.requests }}
        requests: {{- toYaml . | nindent 10 }}
        {{- end }}
        limits:
          {{ $worker.gpuResource }}: {{ $worker.gpus | quote }}
          {{- if $rdma }}
          {{ $values.rdma.resource }}: {{ $values.rdma.count | quote }}
          {{- end }}
          {{- with $worker.resources.limits }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
      {{- $security := deepCopy $values.worker.securityContext }}
      {{- if $rdma }}
      {{- $capabilities := $security.capabilities | default dict }}
      {{- $_ := set $capabilities "add" (append ($capabilities.add | default list) "IPC_LOCK" | uniq) }}
      {{- $_ := set $security "capabilities" $capabilities }}
      {{- end }}
      securityContext: {{- toYaml $security | nindent 8 }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        {{- if $values.model.existingClaim }}
        - {name: model, mountPath: {{ $values.model.mountPath }}, readOnly: true}
        {{- end }}
        {{- with $worker.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $worker.shmSize }}}
    {{- with $values.model.existingClaim }}
    - name: model
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    {{- with $worker.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
