{{/*
Passwords by user and key, as JSON: those of the Secrets that are there, else of the seed, else random. A rendering
makes them once, and keeps them in its values, so that all templates see the same. Empty where they are brought.
*/}}
{{- define "tailrace.passwords" -}}
{{- if not (hasKey .Values "madePasswords") -}}
{{- $root := . -}}
{{- $seed := .Values.credentials.seed -}}
{{- $all := dict -}}
{{- if and (not .Values.credentials.existingSecrets) (not .Values.servers.release) -}}
{{- range $user := include "tailrace.users" . | fromJsonArray -}}
{{- $name := include "tailrace.name" (dict "root" $root "part" $user) -}}
{{- $known := dig "data" dict (lookup "v1" "Secret" $root.Release.Namespace $name) -}}
{{- $made := dict -}}
{{- range $key := concat (list "nats-password" "redis-password") (ternary (list "admin-key") list (eq $user "gateway")) -}}
{{- if hasKey $known $key }}{{ $_ := set $made $key (get $known $key | b64dec) -}}
{{- else if $seed }}{{ $_ := set $made $key (printf "%s/%s/%s" $seed $user $key | sha256sum | trunc 40) -}}
{{- else }}{{ $_ := set $made $key (randAlphaNum 40) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $all $user $made -}}
{{- end -}}
{{- end -}}
{{- $_ := set .Values "madePasswords" ($all | toJson) -}}
{{- end -}}
{{ .Values.madePasswords }}
{{- end -}}

{{/* Digest of a user's passwords, or of all users': pods read them at their start alone. */}}
{{- define "tailrace.passwordsDigest" -}}
{{- $all := include "tailrace.passwords" .root | fromJson -}}
{{ ternary (get $all (.user | default "")) $all (not (empty .user)) | toJson | sha256sum | trunc 16 }}
{{- end -}}
