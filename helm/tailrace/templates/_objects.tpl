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
  storageClassName: {{ ternary "" . (eq . "-") | quote }}
  {{- end }}
  resources: {requests: {storage: {{ .size | quote }}}}
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
subjects: [{kind: ServiceAccount, name: {{ include "tailrace.name" . }}, namespace: {{ .root.Release.Namespace | quote }}}]
{{- end -}}

{{/* Parts of the release that have pods: name -> values. */}}
{{- define "tailrace.parts" -}}
{{- $parts := dict -}}
{{- if eq .Values.mode "job" -}}
{{- range list "scheduler" "agents" "reward" "learner" "weight_sync" }}{{ $_ := set $parts (replace "_" "-" .) (index $.Values .) }}{{ end -}}
{{- $_ := set $parts "run" .Values.run -}}
{{- range $pool, $values := include "tailrace.pools" . | fromJson }}{{ $_ := set $parts (printf "inference-%s" $pool) $values }}{{ end -}}
{{- if .Values.gateway.enabled }}{{ $_ := set $parts "gateway" .Values.gateway }}{{ end -}}
{{- if or .Values.sandbox.replicas (include "tailrace.isScaled" (dict "root" . "part" "sandbox")) }}{{ $_ := set $parts "sandbox" .Values.sandbox }}{{ end -}}
{{- if .Values.autoscaling.enabled }}{{ $_ := set $parts "autoscaler" .Values.autoscaling }}{{ end -}}
{{- end -}}
{{- if include "tailrace.hasNats" . }}{{ $_ := set $parts "nats" .Values.nats }}{{ end -}}
{{- if include "tailrace.hasRedis" . }}{{ $_ := set $parts "redis" .Values.redis }}{{ end -}}
{{- $parts | toJson -}}
{{- end -}}

{{/* Refuses shared memory that its pod cannot hold; arguments: key, values. */}}
{{- define "tailrace.checkShm" -}}
{{- $limit := include "tailrace.memoryLimit" .values -}}
{{- $most := include "tailrace.bytes" $limit | float64 -}}
{{- if and .values.shm $most (gt (include "tailrace.bytes" .values.shm | float64) $most) -}}
{{- fail (printf "%s.shm is %v, and resources.limits.memory %v: what lies in shared memory counts towards the limit, so give more memory" .key .values.shm $limit) -}}
{{- end -}}
{{- end -}}

{{/* Egress to DNS; OpenShift's listens on 5353. */}}
{{- define "tailrace.dns" -}}
- to: {{- toYaml (.Values.networkPolicy.dnsTo | default list) | nindent 4 }}
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- end -}}

{{/* Egress to these ports, at any address unless peers follow. */}}
{{- define "tailrace.openPorts" -}}
{{- $ports := list }}{{ range . }}{{ $ports = append $ports (int .) }}{{ end -}}
- ports: [{{ range $i, $port := uniq $ports }}{{ if $i }}, {{ end }}{port: {{ $port }}, protocol: TCP}{{ end }}]
{{- end -}}
