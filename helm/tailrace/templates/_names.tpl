{{/*
Beginning of the names of a release's objects. A StatefulSet's name has at most 52 characters, since its pods carry it
with a digest in a label: `-inference-default` leaves 34.
*/}}
{{- define "tailrace.prefix" -}}
{{ . | trunc 34 | trimSuffix "-" }}
{{- end -}}

{{/* Name of an object: release and part. `weight_sync` is `weight-sync` where DNS wants it. */}}
{{- define "tailrace.name" -}}
{{- printf "%s-%s" (include "tailrace.prefix" .root.Release.Name) (.part | replace "_" "-") -}}
{{- end -}}

{{- define "tailrace.selector" -}}
app.kubernetes.io/name: tailrace
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .part | replace "_" "-" | quote }}
{{- end -}}

{{- define "tailrace.labels" -}}
{{ include "tailrace.selector" . }}
app.kubernetes.io/part-of: tailrace
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end -}}

{{- define "tailrace.meta" -}}
name: {{ include "tailrace.name" . }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "tailrace.labels" . | nindent 2 }}
  {{- if .values }}
  {{- with .root.Values.defaults.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "tailrace.image" -}}
{{- $image := .root.Values.image -}}
{{- $base := printf "%s-%s" $image.repository (.name | replace "_" "-") -}}
{{- if $image.registry }}{{ $base = printf "%s/%s" (trimSuffix "/" $image.registry) $base }}{{ end -}}
{{- $digests := $image.digests | default dict -}}
{{- with coalesce (get $digests .name) (get $digests (.name | replace "_" "-")) -}}
{{ $base }}@{{ . }}
{{- else -}}
{{ $base }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Release whose NATS, Redis and Secrets the services use. */}}
{{- define "tailrace.serversRelease" -}}
{{ .Values.servers.release | default .Release.Name }}
{{- end -}}
{{- define "tailrace.servers" -}}
{{ include "tailrace.prefix" (include "tailrace.serversRelease" .) }}
{{- end -}}

{{- define "tailrace.hasNats" -}}
{{ if and (not .Values.nats.external.url) (not .Values.servers.release) }}yes{{ end }}
{{- end -}}
{{- define "tailrace.hasRedis" -}}
{{ if and (not .Values.redis.external.url) (not .Values.servers.release) }}yes{{ end }}
{{- end -}}

{{- define "tailrace.natsUrl" -}}
{{- if .Values.nats.external.url }}{{ .Values.nats.external.url }}{{ else -}}
{{ ternary "tls" "nats" .Values.tls.enabled }}://{{ include "tailrace.servers" . }}-nats:4222
{{- end }}
{{- end -}}

{{- define "tailrace.redisUrl" -}}
{{- if .Values.redis.external.url }}{{ .Values.redis.external.url }}{{ else -}}
{{ ternary "rediss" "redis" .Values.tls.enabled }}://{{ include "tailrace.servers" . }}-redis:6379/0
{{- end }}
{{- end -}}

{{- define "tailrace.tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "tailrace.servers" .)) }}
{{- end -}}

{{/* Ports of one or several URLs, with commas between them: JSON. */}}
{{- define "tailrace.ports" -}}
{{- $known := dict "nats" 4222 "tls" 4222 "redis" 6379 "rediss" 6379 "http" 80 "https" 443 "ssh" 22 "git" 9418 -}}
{{- $ports := list -}}
{{- range splitList "," . -}}
{{- $port := regexFind "^[a-z0-9+]+://[^/]*" . | regexFind ":[0-9]+$" | trimPrefix ":" -}}
{{- $ports = append $ports (int ($port | default (get $known (regexFind "^[a-z0-9+]+:" . | trimSuffix ":")) | default 22)) -}}
{{- end -}}
{{ uniq $ports | toJson }}
{{- end -}}

{{/* Port of the object store, if the experiment or the values name one. */}}
{{- define "tailrace.storePort" -}}
{{- $store := .Values.storage.objectStore -}}
{{- if or $store.endpoint $store.credentialsSecret (regexMatch "\"(s3|gs|az|abfs)a?://" (toJson .Values.experiment)) -}}
{{ include "tailrace.portOf" $store.endpoint }}
{{- end -}}
{{- end -}}

{{/* Port of an HTTP address. */}}
{{- define "tailrace.portOf" -}}
{{- $port := regexFind ":[0-9]+" (trimPrefix "http:" (trimPrefix "https:" .)) | trimPrefix ":" -}}
{{ $port | default (ternary "80" "443" (hasPrefix "http://" .)) }}
{{- end -}}

{{/*
Ports to which a service sends its traces. A policy sees the port of the receiver's pod, behind that of its Service: the
usual ones of OTLP are open too.
*/}}
{{- define "tailrace.tracePorts" -}}
{{- $experiment := .root.Values.experiment | default dict -}}
{{- $otlp := list .root.Values.telemetry.otlpEndpoint (dig "tracing" "endpoint" "" $experiment) -}}
{{- $ports := list -}}
{{- range ternary (list) $otlp (eq .service "sandbox") -}}
{{- if hasPrefix "http" . }}{{ $ports = concat $ports (list 4317 4318 (include "tailrace.portOf" . | int)) }}{{ end -}}
{{- end -}}
{{- $mlflow := dig "tracing" "mlflow" "" $experiment -}}
{{- if and (eq .service "agents") (hasPrefix "http" $mlflow) }}{{ $ports = append $ports (include "tailrace.portOf" $mlflow | int) }}{{ end -}}
{{ $ports | uniq | toJson }}
{{- end -}}

{{/* Names of the runs that the servers know; *: any. */}}
{{- define "tailrace.runs" -}}
{{- if eq .Values.mode "standing" }}{{ .Values.standing.runs | default (list "*") | toJson }}{{ else }}{{ list .Values.experiment.exp_name | toJson }}{{ end -}}
{{- end -}}

{{- define "tailrace.users" -}}
["scheduler","agents","gateway","inference","sandbox","reward","learner","weight_sync","autoscaler","tools","cli"]
{{- end -}}

{{/* The experiment of the services: the user's, with the addresses and paths that the chart owns. */}}
{{- define "tailrace.experiment" -}}
{{- $gateway := dict "host" "0.0.0.0" "port" 8000 "service_url" (printf "http://%s:8000" (include "tailrace.name" (dict "root" . "part" "gateway"))) -}}
{{/* Clients outside have another way than the run's own services: the ingress, or what the user says of the Service. */}}
{{- if dig "gateway" "advertised_url" "" .Values.experiment }}
{{- else if .Values.gateway.ingress.enabled }}{{ $_ := set $gateway "advertised_url" (printf "%s://%s" (ternary "https" "http" (ne .Values.gateway.ingress.tlsSecret "")) .Values.gateway.ingress.host) }}
{{- else }}{{ $_ := set $gateway "advertised_url" $gateway.service_url }}{{ end -}}
{{- $any := dict "bind_host" "0.0.0.0" -}}
{{- $owned := dict "output_dir" "/runs" "gateway" $gateway "inference" $any "weight_sync" (deepCopy $any) "learner" (deepCopy $any) -}}
{{- if .Values.autoscaling.enabled }}{{ $_ := set $owned "autoscaler" (dict "mode" .Values.autoscaling.mode "targets" (include "tailrace.targets" . | fromJson)) }}{{ end -}}
{{- mergeOverwrite (deepCopy .Values.experiment) $owned | toJson -}}
{{- end -}}

{{/* Kind of a pool's workload, from its values: a server on several nodes is a group of pods. */}}
{{- define "tailrace.poolKind" -}}
{{ ternary "LeaderWorkerSet" "StatefulSet" (gt (int (.nodes | default 1)) 1) }}
{{- end -}}

{{- define "tailrace.apiVersion" -}}
{{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq . "LeaderWorkerSet") }}
{{- end -}}

{{/*
Pools by name. One that a later values file has set to null is none; others than `default` have the defaults that
values.yaml gives to it.
*/}}
{{- define "tailrace.pools" -}}
{{- $pools := dict -}}
{{- range $pool, $values := .Values.inference.pools -}}
{{- if not (kindIs "invalid" $values) -}}
{{- $given := deepCopy $values -}}
{{- if ne $pool "default" -}}
{{- $usual := dict "resources" (dict "requests" (dict "cpu" "1" "memory" "2Gi") "limits" (dict "memory" "8Gi")) "pdb" (dict "maxUnavailable" 1) -}}
{{- range $key, $value := $usual }}{{ if not (hasKey $given $key) }}{{ $_ := set $given $key $value }}{{ end }}{{ end -}}
{{- end -}}
{{- $_ := set $pools $pool $given -}}
{{- end -}}
{{- end -}}
{{ $pools | toJson }}
{{- end -}}

{{/* Workloads that are scaled: name in the experiment -> kind and name of the object. */}}
{{- define "tailrace.targets" -}}
{{- $root := . -}}
{{- $bounds := dig "autoscaler" "targets" dict .Values.experiment -}}
{{- $pools := include "tailrace.pools" . | fromJson -}}
{{- $all := dict -}}
{{- range $target, $given := $bounds -}}
{{- $pool := trimPrefix "inference-" $target -}}
{{- if and (hasPrefix "inference-" $target) (not (hasKey $pools $pool)) }}{{ fail (printf "experiment.autoscaler.targets: %s names no pool of inference.pools" $target) }}{{ end -}}
{{- if not (or (hasPrefix "inference-" $target) (has $target (list "agents" "sandbox"))) }}{{ fail (printf "experiment.autoscaler.targets: %s is not agents, sandbox or inference-<pool>" $target) }}{{ end -}}
{{- $least := dig "min_replicas" 1 $given | int -}}
{{- $most := dig "max_replicas" 1 $given | int -}}
{{- if gt $least $most }}{{ fail (printf "experiment.autoscaler.targets.%s: min_replicas is %d and max_replicas %d: give bounds in order" $target $least $most) }}{{ end -}}
{{- $kind := "Deployment" -}}
{{- if hasPrefix "inference-" $target }}{{ $kind = include "tailrace.poolKind" (index $pools $pool) }}{{ end -}}
{{- $_ := set $all $target (merge (dict "kind" $kind "name" (include "tailrace.name" (dict "root" $root "part" $target))) $given) -}}
{{- end -}}
{{- $all | toJson -}}
{{- end -}}

{{/* "yes" when something else than Helm sets the replicas of this workload. */}}
{{- define "tailrace.isScaled" -}}
{{- if and .root.Values.autoscaling.enabled (ne .root.Values.autoscaling.mode "metric") (hasKey (include "tailrace.targets" .root | fromJson) .part) }}yes{{ end -}}
{{- end -}}
