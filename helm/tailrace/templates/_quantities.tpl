{{/* Bytes of a quantity of Kubernetes (1.5Gi, 2G, 1e9, 128974848); 0 without one. */}}
{{- define "tailrace.bytes" -}}
{{- $text := toString . | trimPrefix "+" -}}
{{- $number := regexFind "^[0-9.]+([eE][-+]?[0-9]+)?" $text -}}
{{- $small := dict "n" 1e-9 "u" 1e-6 "m" 1e-3 "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $factors := merge $small (dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0) -}}
{{ mulf (float64 ($number | default "0")) (get $factors (trimPrefix $number $text) | default 0.0) }}
{{- end -}}

{{/* Memory limit of a container as the values give it; arguments: its values. */}}
{{- define "tailrace.memoryLimit" -}}
{{ dig "memory" "" ((.resources | default dict).limits | default dict) | default "" }}
{{- end -}}

{{/*
Bytes that Valkey may hold: four fifths of its memory limit, so that it refuses writes, which services wait out, before
the kernel kills it. The rest is for what `maxmemory` leaves out: buffers of the log, fragmentation, and the pages that
change while a fork rewrites the log. Empty without a limit.
*/}}
{{- define "tailrace.maxMemory" -}}
{{- $limit := include "tailrace.memoryLimit" . -}}
{{- if $limit -}}
{{- $bytes := include "tailrace.bytes" $limit | float64 -}}
{{- if or (lt $bytes 33554432.0) (gt $bytes 1e18) -}}
{{- fail (printf "redis.resources.limits.memory is %s, %.0f bytes: give Valkey between 32Mi and 1e18 bytes, for example 4Gi" $limit $bytes) -}}
{{- end -}}
{{ mulf $bytes 0.8 | floor | printf "%.0f" }}
{{- end -}}
{{- end -}}
