{{/*
Pod template of a service. Arguments: root; part (name of objects); service (package and NATS user);
values (the service's values); image; gpus; shm; mounts: list of runs, models, code; config: ConfigMap;
ports: extra container ports; preStop: seconds of sleep; headless: name of the headless Service.
*/}}
{{- define "tailrace.pod" -}}
{{- $root := .root -}}
{{- $defaults := $root.Values.defaults -}}
{{- $values := .values -}}
{{- $mounts := .mounts | default list -}}
{{- $store := $root.Values.storage.objectStore.credentialsSecret -}}
metadata:
  labels:
    {{- include "tailrace.labels" . | nindent 4 }}
    {{- with mergeOverwrite (deepCopy ($defaults.podLabels | default dict)) ($values.podLabels | default dict) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/experiment: {{ printf "%s%s" (include "tailrace.experiment" $root) (ternary (toJson $values.overrides) "" (not (empty .config))) | sha256sum }}
    {{- if not (or $root.Values.credentials.existingSecrets $root.Values.servers.release) }}
    checksum/passwords: {{ include "tailrace.passwordsDigest" (dict "root" $root "user" .service) | quote }}
    {{- end }}
    {{- if and (has "code" $mounts) $root.Values.userCode.files }}
    checksum/code: {{ toJson $root.Values.userCode.files | sha256sum }}
    {{- end }}
    {{- with mergeOverwrite (deepCopy ($defaults.podAnnotations | default dict)) ($values.podAnnotations | default dict) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tailrace.name" . }}
  automountServiceAccountToken: {{ .token | default false }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "tailrace.grace" . }}
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "tailrace.placement" . | nindent 2 }}
  securityContext: {{- include "tailrace.podSecurity" $root | nindent 4 }}
  {{- if and (has "code" $mounts) (or $root.Values.userCode.image.name $root.Values.userCode.git.url) }}
  initContainers: {{- include "tailrace.codeInit" . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .part | replace "_" "-" }}
      image: {{ include "tailrace.image" (dict "root" $root "name" .image) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      terminationMessagePolicy: FallbackToLogsOnError
      {{- with .command }}
      command: {{- toYaml . | nindent 8 }}
      {{- end }}
      args: {{- toYaml (.args | default (list "--config" "/etc/tailrace/experiment.json" "--instance-id" "$(POD_NAME)")) | nindent 8 }}
      env: {{- include "tailrace.env" . | nindent 8 }}
      {{- if not .noHealth }}
      ports:
        - {name: metrics, containerPort: 9090}
        {{- with .ports }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      # Imports and the model take long: liveness begins once the process has listened.
      startupProbe:
        httpGet: {path: /livez, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 300
      livenessProbe:
        httpGet: {path: /livez, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- end }}
      {{- with .preStop }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ . | quote }}]}
      {{- end }}
      resources: {{- include "tailrace.resources" . | nindent 8 }}
      securityContext: {{- include "tailrace.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: experiment, mountPath: /etc/tailrace, readOnly: true}
        - {name: credentials, mountPath: /etc/tailrace-credentials, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: state, mountPath: /var/lib/tailrace}
        {{- if .shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if has "runs" $mounts }}
        - {name: runs, mountPath: /runs}
        {{- end }}
        {{- if and (has "models" $mounts) $root.Values.storage.models.existingClaim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and $store (has .service (list "learner" "reward")) }}
        - {name: store, mountPath: /etc/tailrace-store, readOnly: true}
        {{- end }}
        {{- if has "code" $mounts }}
        - {name: code, mountPath: /opt/user, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.enabled }}
        - {name: tls, mountPath: /etc/tailrace-tls, readOnly: true}
        {{- end }}
  volumes:
    - name: experiment
      configMap: {name: {{ .config | default (include "tailrace.name" (dict "root" $root "part" "experiment")) }}}
    - name: credentials
      secret:
        secretName: {{ include "tailrace.servers" $root }}-{{ .service | replace "_" "-" }}
        defaultMode: 0440
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
    - name: state
      {{- if .stateClaim }}
      persistentVolumeClaim: {claimName: {{ .stateClaim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $root.Values.storage.state | quote }}}
      {{- end }}
    {{- with .shm }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ . | quote }}}
    {{- end }}
    {{- if has "runs" $mounts }}
    - name: runs
      persistentVolumeClaim: {claimName: {{ $root.Values.storage.runs.existingClaim | default (include "tailrace.name" (dict "root" $root "part" "runs")) | quote }}}
    {{- end }}
    {{- if and (has "models" $mounts) $root.Values.storage.models.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $root.Values.storage.models.existingClaim | quote }}, readOnly: true}
    {{- end }}
    {{- if and $store (has .service (list "learner" "reward")) }}
    - name: store
      secret: {secretName: {{ $store | quote }}, defaultMode: 0440, items: [{key: credentials, path: credentials}]}
    {{- end }}
    {{- if has "code" $mounts }}
    - name: code
      {{- if or $root.Values.userCode.image.name $root.Values.userCode.git.url }}
      emptyDir: {sizeLimit: 1Gi}
      {{- else }}
      configMap: {name: {{ include "tailrace.name" (dict "root" $root "part" "code") }}}
      {{- end }}
    {{- end }}
    {{- if $root.Values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ include "tailrace.tlsSecret" $root | quote }}
        items: [{key: ca.crt, path: ca.crt}]
        defaultMode: 0444
    {{- end }}
{{- end -}}

{{/* Seconds, rounded up, that a service takes to drain: of the pool, the experiment, or the service's default. */}}
{{- define "tailrace.drain" -}}
{{- $known := .root.Files.Get "files/drains.json" | fromJson -}}
{{- $drain := dig .service "drain_s" (get $known .service | default (ternary 5 20 (eq .service "cli"))) .root.Values.experiment -}}
{{- if eq .service "inference" }}{{ $drain = dig "drain_s" $drain (.values.overrides | default dict) }}{{ end -}}
{{ ceil $drain | int }}
{{- end -}}

{{/* Seconds that a service's pod has to end: what it takes to drain, and more. */}}
{{- define "tailrace.grace" -}}
{{- $drain := include "tailrace.drain" . | int -}}
{{- $least := add $drain 5 (int (.preStop | default 0)) | int -}}
{{- $grace := int (.values.terminationGracePeriodSeconds | default (max 60 (add $least 10))) -}}
{{- if lt $grace $least -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: it must exceed experiment.%s.drain_s (%d) by 5 s and preStop; left out, it follows" .part $grace .service $drain) -}}
{{- end -}}
{{ $grace }}
{{- end -}}

{{/* Without defaults.runAsUser the cluster gives user and groups, as OpenShift does. */}}
{{- define "tailrace.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.defaults.runAsUser }}
runAsUser: {{ int . }}
runAsGroup: {{ int . }}
fsGroup: {{ int . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tailrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ not .root.Values.defaults.writableRoot }}
runAsNonRoot: true
privileged: false
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where a pod may run: the service's own values win over `defaults`. */}}
{{- define "tailrace.placement" -}}
{{- $defaults := .root.Values.defaults -}}
{{- $values := .values -}}
{{- with $values.nodeSelector | default $defaults.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations | default $defaults.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity | default $defaults.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName | default $defaults.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.schedulerName | default $defaults.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with $values.runtimeClassName | default $defaults.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- if .spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tailrace.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "tailrace.resources" -}}
{{- $given := deepCopy (.values.resources | default dict) -}}
{{- if .gpus -}}
{{- $gpu := dict (.values.gpuResource | default .root.Values.defaults.gpuResource) (int .gpus) -}}
{{- $_ := set $given "limits" (merge $gpu ($given.limits | default dict)) -}}
{{- $_ := set $given "requests" (merge $gpu ($given.requests | default dict)) -}}
{{- end -}}
{{ toYaml $given }}
{{- end -}}

{{/* The later one of two variables with one name: a list with both is refused by server-side apply. */}}
{{- define "tailrace.env" -}}
{{- $all := concat (include "tailrace.ownEnv" . | fromYamlArray) (.root.Values.defaults.env | default list) (.values.env | default list) -}}
{{- $last := dict -}}
{{- range $i, $each := $all }}{{ $_ := set $last $each.name $i }}{{ end -}}
{{- $env := list -}}
{{- range $i, $each := $all }}{{ if eq $i (get $last $each.name) }}{{ $env = append $env $each }}{{ end }}{{ end -}}
{{ toYaml $env }}
{{- end -}}

{{- define "tailrace.ownEnv" -}}
{{- $root := .root -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: TAILRACE_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: TAILRACE_NATS_URL, value: {{ include "tailrace.natsUrl" $root | quote }}}
- {name: TAILRACE_NATS_USER, value: {{ .service }}}
- {name: TAILRACE_NATS_PASSWORD_FILE, value: /etc/tailrace-credentials/nats-password}
- {name: TAILRACE_REDIS_URL, value: {{ include "tailrace.redisUrl" $root | quote }}}
- {name: TAILRACE_REDIS_USER, value: {{ .service }}}
- {name: TAILRACE_REDIS_PASSWORD_FILE, value: /etc/tailrace-credentials/redis-password}
{{- if $root.Values.tls.enabled }}
- {name: TAILRACE_CA_FILE, value: /etc/tailrace-tls/ca.crt}
{{- end }}
- {name: TAILRACE_METRICS_HOST, value: 0.0.0.0}
- {name: TAILRACE_METRICS_PORT, value: "9090"}
- {name: TAILRACE_STATE_DIR, value: /var/lib/tailrace}
# Two runs with one name have different trace ids.
- {name: TAILRACE_TRACE_SALT, value: {{ printf "%s/%s" $root.Release.Namespace $root.Release.Name | quote }}}
- {name: TAILRACE_LOG, value: json}
{{- with $root.Values.telemetry.logLevel }}
- {name: TAILRACE_LOG_LEVEL, value: {{ . | quote }}}
{{- end }}
{{- if and $root.Values.telemetry.otlpEndpoint (ne .service "sandbox") }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ $root.Values.telemetry.otlpEndpoint | quote }}}
{{- with $root.Values.telemetry.otlpHeadersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: headers}}
{{- end }}
{{- end }}
- {name: OMP_NUM_THREADS, value: {{ .values.numThreads | default $root.Values.defaults.numThreads | quote }}}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
- {name: HOME, value: /tmp}
{{- if has "models" (.mounts | default list) }}
- {name: HF_HOME, value: /var/lib/tailrace/hub}
- {name: HF_HUB_OFFLINE, value: {{ ternary "1" "0" $root.Values.storage.hub.offline | quote }}}
{{- with $root.Values.storage.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
{{- end }}
{{- end }}
{{- if has .service (list "learner" "reward") }}
{{- with $root.Values.storage.objectStore }}
{{- if .credentialsSecret }}
- {name: AWS_SHARED_CREDENTIALS_FILE, value: /etc/tailrace-store/credentials}
{{- end }}
{{- if .endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ .endpoint | quote }}}
{{- end }}
{{- if .region }}
- {name: AWS_DEFAULT_REGION, value: {{ .region | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- if has "code" (.mounts | default list) }}
- {name: PYTHONPATH, value: /opt/user}
{{- end }}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tailrace.codeInit" -}}
{{- $code := .root.Values.userCode -}}
{{- if $code.git.url }}
- name: code
  image: {{ required "userCode.git.image: name an image with git" $code.git.image | quote }}
  command: [sh, -ec]
  # The folder is root's, which git takes for a foe's; a node that starts anew runs this again in the same volume.
  args:
    - |
      git config --global safe.directory /opt/user
      find /opt/user -mindepth 1 -delete
      git clone --quiet "$URL" /opt/user
      git -C /opt/user checkout --quiet "$REF"
  env:
    - {name: HOME, value: /tmp}
    - {name: URL, value: {{ $code.git.url | quote }}}
    - {name: REF, value: {{ $code.git.ref | quote }}}
{{- else }}
- name: code
  image: {{ $code.image.name | quote }}
  command: [cp, -r, {{ printf "%s/." (trimSuffix "/" $code.image.path) | quote }}, /opt/user]
{{- end }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  resources: {{- toYaml ($code.resources | default dict) | nindent 4 }}
  securityContext: {{- include "tailrace.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: code, mountPath: /opt/user}
    - {name: tmp, mountPath: /tmp}
{{- end -}}
