{{/* The router's options, as JSON. */}}
{{- define "ppd.routerOptions" -}}
{{- $root := . -}}
{{- $found := .Values.router.discovery -}}
{{- $pods := dict "namespace" ($found.namespace | default .Release.Namespace) "port" ($found.port | default "http") -}}
{{- range $role := list "prefill" "decode" "replica" -}}
{{- if index $found $role -}}
{{- $_ := set $pods $role (index $found $role) -}}
{{- else if (index $root.Values $role).enabled -}}
{{- $_ := set $pods $role (include "ppd.podSelector" (dict "root" $root "role" $role)) -}}
{{- end -}}
{{- end -}}
{{- $options := deepCopy .Values.router.config -}}
{{- $_ := set $options "host" .Values.listenAddress -}}
{{- $_ := set $options "port" 8000 -}}
{{- $_ := set $options "admin_port" 8001 -}}
{{- $_ := set $options "kubernetes" $pods -}}
{{- if .Values.router.table.configMap -}}
{{- $_ := set $options "table" "/etc/ppd/table/table.json" -}}
{{- end -}}
{{- if .Values.router.tlsSecret -}}
{{- $_ := set $options "tls_certificate" "/etc/ppd/tls/tls.crt" -}}
{{- $_ := set $options "tls_key" "/etc/ppd/tls/tls.key" -}}
{{- end -}}
{{- if .Values.pool.enabled -}}
{{- $retrieval := $options.retrieval | default dict -}}
{{- if not (or (hasKey $retrieval "url") (hasKey $retrieval "milvus") (hasKey $retrieval "chroma")) -}}
{{- $_ := set $retrieval "url" (printf "http://%s-pool:8100" (include "ppd.fullname" .)) -}}
{{- end -}}
{{- $_ := set $options "retrieval" $retrieval -}}
{{- end -}}
{{- $tenants := $options.tenants | default dict -}}
{{- range $name, $keys := .Values.secrets.tenantKeys -}}
{{- $tenant := index $tenants $name | default dict -}}
{{- $digests := $tenant.keys | default list -}}
{{- range $keys -}}
{{- $digests = append $digests (sha256sum .) -}}
{{- end -}}
{{- $_ := set $tenant "keys" $digests -}}
{{- $_ := set $tenants $name $tenant -}}
{{- end -}}
{{- if $tenants -}}
{{- $_ := set $options "tenants" $tenants -}}
{{- end -}}
{{ toJson $options }}
{{- end -}}

{{/* The router's file. */}}
{{- define "ppd.routerFile" -}}
{{ include "ppd.toml" (dict "table" (include "ppd.routerOptions" . | fromJson) "path" "") | trim }}
{{- end -}}
