{{/* The name of all resources of the routers. */}}
{{- define "splitrail.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "splitrail.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Labels that never change during the life of a release. */}}
{{- define "splitrail.selector" -}}
app.kubernetes.io/name: splitrail
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "splitrail.labels" -}}
{{ include "splitrail.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "splitrail.engineSelector" -}}
app.kubernetes.io/name: splitrail-engine
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The pod security standard "restricted". */}}
{{- define "splitrail.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "splitrail.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* Not empty if the routers look for workers among the pods. */}}
{{- define "splitrail.watchesPods" -}}
{{- range .Values.router.config.models -}}
{{- range .discovery -}}
{{- if eq .kind "kubernetes" -}}yes{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty if shims attach: those of the pools, or others that the configuration lets in. */}}
{{- define "splitrail.hasFleet" -}}
{{- if or .Values.engines.pools (hasKey .Values.router.config "fleet") -}}yes{{- end -}}
{{- end -}}

{{/* The scheme of the listener of clients, for probes. */}}
{{- define "splitrail.scheme" -}}
{{- $http := dig "listen" "http" "" .Values.router.config -}}
{{- if and (kindIs "map" $http) (hasKey $http "tls") -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{/* The configuration of the routers: that of the values, with what the chart adds. */}}
{{- define "splitrail.config" -}}
{{- $config := deepCopy .Values.router.config -}}
{{- $listen := dict "http" "0.0.0.0:8000" "admin" "127.0.0.1:9090" "metrics" "0.0.0.0:9091" -}}
{{- if include "splitrail.hasFleet" . -}}
{{- $_ := set $listen "fleet" "0.0.0.0:8002" -}}
{{- $tokens := list -}}
{{- range $pool, $_ := .Values.engines.pools -}}
{{- $path := printf "/run/secrets/splitrail-fleet/%s" $pool -}}
{{- $workers := list (printf "%s-%s-*" (include "splitrail.name" $) $pool) -}}
{{- $tokens = append $tokens (dict "token" (dict "kind" "file" "path" $path) "workers" $workers) -}}
{{- end -}}
{{- $fleet := dict "networks" .Values.fleet.networks -}}
{{- if $tokens -}}
{{- $_ := set $fleet "tokens" $tokens -}}
{{- end -}}
{{- range $key, $value := $config.fleet | default dict -}}
{{- $_ := set $fleet $key $value -}}
{{- end -}}
{{- $_ := set $config "fleet" $fleet -}}
{{- end -}}
{{- range $key, $value := $config.listen | default dict -}}
{{- $_ := set $listen $key $value -}}
{{- end -}}
{{- $_ := set $config "listen" $listen -}}
{{- toYaml $config -}}
{{- end -}}
