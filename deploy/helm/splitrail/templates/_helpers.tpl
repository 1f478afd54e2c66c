{{/* The name of all resources of the routers. */}}
{{- define "splitrail.name" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
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

{{- define "splitrail.simulatedSelector" -}}
app.kubernetes.io/name: splitrail-simulated-engine
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

{{/*
The container of a shim beside an engine, for pods of this chart and of others. It takes a dict with
  image        the image with splitrail-shim
  router       HOST:PORT of the routers: SERVICE-fleet.NAMESPACE:8002
  role         prefill, decode or both
  token        a dict with `secret` and `key`: where the shim's token is
  engine       the engine's address (http://127.0.0.1:8000)
  port         the port of the shim (8001)
  args         further arguments
  pullPolicy, logFormat, resources
*/}}
{{- define "splitrail.shimContainer" -}}
{{- $port := .port | default 8001 -}}
{{- $resources := dict "requests" (dict "cpu" "250m" "memory" "256Mi") "limits" (dict "memory" "1Gi") -}}
# An ordinary container: an init container with `restartPolicy: Always` would get its SIGTERM
# only after the engine has stopped, and could not drain.
- name: shim
  image: {{ required "image: the image with splitrail-shim" .image }}
  imagePullPolicy: {{ .pullPolicy | default "IfNotPresent" }}
  command: [/usr/local/bin/splitrail-shim]
  args:
    - --engine={{ .engine | default "http://127.0.0.1:8000" }}
    - --listen=0.0.0.0:{{ $port }}
    - --advertise=http://$(POD_IP):{{ $port }}
    - --router={{ required "router: HOST:PORT of the routers" .router }}
    - --role={{ required "role: prefill, decode or both" .role }}
    - --id=$(POD_NAME)
    - --log-format={{ .logFormat | default "json" }}
    {{- range .args }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: POD_IP
      valueFrom: { fieldRef: { fieldPath: status.podIP } }
    - name: POD_NAME
      valueFrom: { fieldRef: { fieldPath: metadata.name } }
    - name: SPLITRAIL_FLEET_TOKEN
      valueFrom: { secretKeyRef: { name: {{ .token.secret }}, key: {{ .token.key }} } }
  ports:
    - { name: shim, containerPort: {{ $port }} }
  readinessProbe:
    httpGet: { path: /splitrail/ready, port: shim }
    periodSeconds: 5
  livenessProbe:
    httpGet: { path: /splitrail/health, port: shim }
    periodSeconds: 10
    failureThreshold: 6
  resources: {{- toYaml (.resources | default $resources) | nindent 4 }}
  securityContext:
    {{- include "splitrail.containerSecurity" . | nindent 4 }}
    runAsUser: 65532
    runAsGroup: 65532
    seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{/*
The lifecycle of an engine's container beside a shim. The image of the engine needs `curl`. Takes a
dict with `port`, the port of the shim (8001).
*/}}
{{- define "splitrail.stopAfterShim" -}}
# Both containers are asked to stop at once: the engine waits here until the shim has drained and is
# gone.
preStop:
  exec:
    command: [sh, -c, "while curl -s -o /dev/null http://127.0.0.1:{{ .port | default 8001 }}/splitrail/health; do sleep 1; done"]
{{- end -}}

{{/*
The namespaces in which the routers look for workers among the pods, by their service account. Each has
an InferencePool that says which pods those are, or nothing.
*/}}
{{- define "splitrail.namespaces" -}}
{{- $namespaces := dict -}}
{{- range .Values.router.config.models -}}
{{- range .discovery -}}
{{- if and (eq .kind "kubernetes") (not .kubeconfig) -}}
{{- $namespace := .namespace | default $.Release.Namespace -}}
{{- $_ := set $namespaces $namespace (or .inference_pool (get $namespaces $namespace)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $namespaces -}}
{{- end -}}

{{/* Not empty if shims attach: those of the pools, or others that the configuration lets in. */}}
{{- define "splitrail.hasFleet" -}}
{{- $fleet := .Values.router.config.fleet | default dict -}}
{{- $listener := dig "listen" "fleet" "" .Values.router.config -}}
{{- if or .Values.engines.pools $fleet.token $fleet.tokens $fleet.tls $listener -}}yes{{- end -}}
{{- end -}}

{{/*
A probe of the listener for metrics, which needs no client certificate. It takes a dict with `root`,
`path`, and `of`, the values of the probe, which may replace what is asked.
*/}}
{{- define "splitrail.probe" -}}
{{- $scheme := include "splitrail.scheme" (dict "root" .root "listener" "metrics") -}}
{{- $get := dict "path" .path "port" "metrics" "scheme" $scheme -}}
{{- $asks := or (hasKey .of "exec") (hasKey .of "grpc") (hasKey .of "tcpSocket") -}}
{{- toYaml (ternary .of (merge (dict) .of (dict "httpGet" $get)) $asks) -}}
{{- end -}}

{{/* The scheme of a listener. It takes a dict with `root` and `listener`. */}}
{{- define "splitrail.scheme" -}}
{{- $of := dig "listen" .listener "" .root.Values.router.config -}}
{{- if and (kindIs "map" $of) (hasKey $of "tls") -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{/* The port of a listener, or nothing. It takes a dict with `root` and `listener`. */}}
{{- define "splitrail.port" -}}
{{- $of := get (include "splitrail.config" .root | fromYaml).listen .listener -}}
{{- if kindIs "map" $of -}}{{- $of = $of.address -}}{{- end -}}
{{- regexFind "[0-9]+$" ($of | default "") -}}
{{- end -}}

{{/* Not empty if anything is read from the claim with the models. */}}
{{- define "splitrail.readsModels" -}}
{{- $path := .Values.models.mountPath | trimSuffix "/" | printf "\"%s" -}}
{{- $config := toJson .Values.router.config -}}
{{- if or .Values.engines.pools (contains (print $path "/") $config) (contains (print $path "\"") $config) -}}yes{{- end -}}
{{- end -}}

{{/* The configuration of the routers: that of the values, with what the chart adds. */}}
{{- define "splitrail.config" -}}
{{- $config := deepCopy .Values.router.config -}}
{{- $listen := dict "http" "0.0.0.0:8000" "admin" "127.0.0.1:9090" "metrics" "0.0.0.0:9091" -}}
{{- $fleet := dict -}}
{{- range $config.models -}}
{{- range .discovery -}}
{{- $_ := set $fleet "networks" $.Values.fleet.networks -}}
{{- if .selector -}}
{{- $_ := set . "selector" (tpl .selector $) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if include "splitrail.hasFleet" . -}}
{{- $_ := set $listen "fleet" "0.0.0.0:8002" -}}
{{- $_ := set $fleet "networks" .Values.fleet.networks -}}
{{- end -}}
{{- $tokens := list -}}
{{- range $pool, $_ := .Values.engines.pools -}}
{{- $path := printf "/run/secrets/splitrail-fleet/%s" $pool -}}
{{- $workers := list (printf "%s-%s-*" (include "splitrail.name" $) $pool) -}}
{{- $tokens = append $tokens (dict "token" (dict "kind" "file" "path" $path) "workers" $workers) -}}
{{- end -}}
{{- if $tokens -}}
{{- $_ := set $fleet "tokens" $tokens -}}
{{- end -}}
{{- range $key, $value := $config.fleet | default dict -}}
{{- $_ := set $fleet $key $value -}}
{{- end -}}
{{- if $fleet -}}
{{- $_ := set $config "fleet" $fleet -}}
{{- end -}}
{{- range $key, $value := $config.listen | default dict -}}
{{- $_ := set $listen $key $value -}}
{{- end -}}
{{- $_ := set $config "listen" $listen -}}
{{- toYaml $config -}}
{{- end -}}
