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
namespace: {{ .root.Release.Namespace }}
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
{{- with index $image.digests .name -}}
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

{{/* Port of the object store, if the experiment or the values name one. */}}
{{- define "tailrace.storePort" -}}
{{- $store := .Values.storage.objectStore -}}
{{- if or $store.endpoint $store.credentialsSecret (regexMatch "\"(s3|gs|az|abfs)a?://" (toJson .Values.experiment)) -}}
{{- $port := regexFind ":[0-9]+" (trimPrefix "http:" (trimPrefix "https:" $store.endpoint)) | trimPrefix ":" -}}
{{ $port | default (ternary "80" "443" (hasPrefix "http://" $store.endpoint)) }}
{{- end -}}
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
{{- $gateway := dict "host" "0.0.0.0" "port" 8000 "advertised_url" (printf "http://%s:8000" (include "tailrace.name" (dict "root" . "part" "gateway"))) -}}
{{- if .Values.gateway.ingress.enabled }}{{ $_ := set $gateway "advertised_url" (printf "%s://%s" (ternary "https" "http" (ne .Values.gateway.ingress.tlsSecret "")) .Values.gateway.ingress.host) }}{{ end -}}
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

{{/* Workloads that are scaled: name in the experiment -> kind and name of the object. */}}
{{- define "tailrace.targets" -}}
{{- $root := . -}}
{{- $bounds := dig "autoscaler" "targets" dict .Values.experiment -}}
{{- $all := dict -}}
{{- range $target, $given := $bounds -}}
{{- $pool := trimPrefix "inference-" $target -}}
{{- if and (hasPrefix "inference-" $target) (not (hasKey $root.Values.inference.pools $pool)) }}{{ fail (printf "experiment.autoscaler.targets: %s names no pool of inference.pools" $target) }}{{ end -}}
{{- if not (or (hasPrefix "inference-" $target) (has $target (list "agents" "sandbox"))) }}{{ fail (printf "experiment.autoscaler.targets: %s is not agents, sandbox or inference-<pool>" $target) }}{{ end -}}
{{- $kind := "Deployment" -}}
{{- if hasPrefix "inference-" $target }}{{ $kind = include "tailrace.poolKind" (index $root.Values.inference.pools $pool) }}{{ end -}}
{{- $_ := set $all $target (merge (dict "kind" $kind "name" (include "tailrace.name" (dict "root" $root "part" $target))) $given) -}}
{{- end -}}
{{- $all | toJson -}}
{{- end -}}

{{/* "yes" when something else than Helm sets the replicas of this workload. */}}
{{- define "tailrace.isScaled" -}}
{{- if and .root.Values.autoscaling.enabled (ne .root.Values.autoscaling.mode "metric") (hasKey (include "tailrace.targets" .root | fromJson) .part) }}yes{{ end -}}
{{- end -}}
