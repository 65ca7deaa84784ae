{{- define "tailrace.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- include "tailrace.meta" . | nindent 2 }}
  {{- if .keep }}
  annotations: {helm.sh/resource-policy: keep}
  {{- end }}
spec:
  accessModes: {{- toYaml .modes | nindent 4 }}
  {{- with .class }}
  storageClassName: {{ . }}
  {{- end }}
  resources: {requests: {storage: {{ .size }}}}
{{- end -}}

{{/* May read and set the scale of these objects, nothing else. */}}
{{- define "tailrace.scaleRules" -}}
{{- $names := dict "Deployment" list "StatefulSet" list "LeaderWorkerSet" list -}}
{{- range .targets }}{{ $_ := set $names .kind (append (get $names .kind) .name) }}{{ end -}}
{{- range $kind, $of := $names }}
{{- if $of }}
- apiGroups: [{{ include "tailrace.apiVersion" $kind | dir }}]
  resources: [{{ lower $kind }}s/scale]
  resourceNames: {{ sortAlpha $of | toJson }}
  verbs: [get, patch]
{{- end }}
{{- end }}
{{- end -}}

{{- define "tailrace.roleBinding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{- include "tailrace.meta" . | nindent 2 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ include "tailrace.name" . }}}
subjects: [{kind: ServiceAccount, name: {{ include "tailrace.name" . }}, namespace: {{ .root.Release.Namespace }}}]
{{- end -}}

{{/* Parts of the release that have pods: name -> values. */}}
{{- define "tailrace.parts" -}}
{{- $parts := dict -}}
{{- if eq .Values.mode "job" -}}
{{- range list "scheduler" "agents" "reward" "learner" "weight_sync" }}{{ $_ := set $parts (replace "_" "-" .) (index $.Values .) }}{{ end -}}
{{- $_ := set $parts "run" .Values.run -}}
{{- range $pool, $values := .Values.inference.pools }}{{ $_ := set $parts (printf "inference-%s" $pool) $values }}{{ end -}}
{{- if .Values.gateway.enabled }}{{ $_ := set $parts "gateway" .Values.gateway }}{{ end -}}
{{- if or .Values.sandbox.replicas (include "tailrace.isScaled" (dict "root" . "part" "sandbox")) }}{{ $_ := set $parts "sandbox" .Values.sandbox }}{{ end -}}
{{- if .Values.autoscaling.enabled }}{{ $_ := set $parts "autoscaler" .Values.autoscaling }}{{ end -}}
{{- end -}}
{{- if include "tailrace.hasNats" . }}{{ $_ := set $parts "nats" .Values.nats }}{{ end -}}
{{- if include "tailrace.hasRedis" . }}{{ $_ := set $parts "redis" .Values.redis }}{{ end -}}
{{- $parts | toJson -}}
{{- end -}}
