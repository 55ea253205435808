{{/* A key: bare where TOML allows it. */}}
{{- define "ppd.tomlKey" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{ . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{/* A value. JSON's strings, numbers and booleans are TOML's too; lists and tables are written here. */}}
{{- define "ppd.tomlValue" -}}
{{- if kindIs "map" . -}}
{{- $items := list -}}
{{- range $key, $value := . -}}
{{- $items = append $items (printf "%s = %s" (include "ppd.tomlKey" $key) (include "ppd.tomlValue" $value)) -}}
{{- end -}}
{ {{- join ", " $items -}} }
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}
{{- $items = append $items (include "ppd.tomlValue" .) -}}
{{- end -}}
[{{ join ", " $items }}]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{/* A table: its values first, then its tables. Nulls are left out. Arguments: table, path. */}}
{{- define "ppd.toml" -}}
{{- $path := .path -}}
{{- range $key, $value := .table }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ include "ppd.tomlKey" $key }} = {{ include "ppd.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $key, $value := .table }}
{{- if kindIs "map" $value }}
{{- $below := printf "%s%s" $path (include "ppd.tomlKey" $key) }}

[{{ $below }}]
{{- include "ppd.toml" (dict "table" $value "path" (printf "%s." $below)) }}
{{- end }}
{{- end }}
{{- end -}}
